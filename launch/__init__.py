"""Launchers: the same command on this host, on Slurm, on TPU pods and on GKE; and sweeps over experiments."""
