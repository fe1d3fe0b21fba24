"""The training loop: from an experiment's pieces to a finished run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from signal import SIGINT
from typing import Any, NamedTuple

import jax

from ctx_jax import kernels
from ctx_jax.contract import Batch, Reader, TokenStore, Variables
from ctx_jax.data.loader import Loader
from ctx_jax.evaluation.perplexity import accumulate, measure
from ctx_jax.objectives.distillation import TEACHER
from ctx_jax.parallel.mesh import check_batch
from ctx_jax.parallel.sharding import batch_sharding
from ctx_jax.signals import Interrupted, Preempted
from ctx_jax.training.checkpoints import METRICS, Checkpoints, find_checkpoint
from ctx_jax.training.metrics import Display, Meter, Metrics, due, read_metrics, summary
from ctx_jax.training.optimizers import OptimizerConfig
from ctx_jax.training.retention import exhausted, score, scores
from ctx_jax.training.state import (
    TrainState,
    abstract_fixed,
    abstract_state,
    init_state,
    memory_maker,
    shardings_of,
    variables,
)
from ctx_jax.training.step import loader_transform, make_eval_step, make_train_step, prepared_shapes
from ctx_jax.training.stopping import Stop, Watch

MOST = {"steps": 2**31 - 1, "seed": 2**32 - 1}
"""The largest values that steps are counted in, and that random keys tell apart."""

READER, EVALUATED = "reader_start", "evaluated"
"""Where a checkpoint says at which step its run's reader began, and whether the evaluation that was due after its step
came before it (a run that is stopped saves first)."""


@dataclass(frozen=True)
class Training:
    """How long to train, and how often what happens on the way; a cadence of 0 means only at the end."""

    steps: int = 1000
    """Updates of the parameters; also the length of the learning rate's schedule, unless that sets its own."""
    seed: int = 0
    """Seed of the initial parameters, the order of the data, the corruption and dropout."""
    accumulation: int = 1
    """Micro-batches that each batch is split into: less memory, the same gradient."""
    evaluate_every: int = 0
    """Steps between evaluations."""
    evaluate_batches: int | None = None
    """Batches of an evaluation, from the first on; None = the whole of the validation text."""
    checkpoint_every: int = 0
    """Steps between checkpoints."""
    log_every: int = 10
    """Steps between lines in metrics.jsonl, and on stderr where that is no terminal."""
    keep: int = 3
    """How many of the newest checkpoints stay."""
    keep_every: int = 0
    """Steps whose multiples are saved and stay for good."""
    best: str | None = None
    """A number of the evaluation (loss, accuracy, ...): evaluated steps are saved, and the best one stays."""
    patience: int | None = None
    """Evaluations in a row that are no better than the best one by `best` (None: the loss) after which training ends,
    however many steps are left; None = never."""
    epochs: float | None = None
    """Passes over labelled examples, from which the steps follow; evaluation and checkpoints then come after each, if
    they have no other cadence."""
    timeout: float = 1800.0
    """Seconds without a finished step, evaluated batch or save after which the run ends with an error that names the
    host; 0 = never."""

    def __post_init__(self) -> None:
        least = {"steps": 1, "accumulation": 1, "keep": 1}
        for name, value in vars(self).items():
            if isinstance(value, int | float) and name != "evaluate_batches" and value < least.get(name, 0):
                raise ValueError(f"training {name} {value}: choose {least.get(name, 0)} or more")
        for name, most in MOST.items():
            if getattr(self, name) > most:
                raise ValueError(f"training {name} {getattr(self, name)}: choose {most} or less")
        if self.epochs is not None and not self.epochs > 0:
            raise ValueError(f"training epochs {self.epochs}: choose more than 0")
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"training patience {self.patience}: choose 1 or more, or None to train to the end")
        if self.evaluate_batches is not None and self.evaluate_batches < 1:
            raise ValueError(f"training evaluate_batches {self.evaluate_batches}: choose 1 or more, or None for all")

    @property
    def chooses(self) -> str:
        """The number of the evaluation that says which of a run's steps is the best."""
        return self.best or "loss"


class Text(NamedTuple):
    """A store and how it is read."""

    store: TokenStore
    reader: Reader


def train(
    *,
    model: Any,
    objective: Any,
    optimizer: OptimizerConfig,
    mesh: jax.sharding.Mesh,
    text: Text,
    evaluation_text: Text,
    batch_size: int,
    training: Training,
    run: Path,
    experiment: dict[str, Any],
    watch: Watch,
    evaluation_batch_size: int | None = None,
    continue_from: Path | None = None,
    start_from: Path | None = None,
    anew: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Trains until step `training.steps`, or until `training.patience` is at its end, going on where an earlier call
    with the same `run` stopped.

    Args:
        model: an unbound module.
        run: the run's folder.
        experiment: the resolved experiment as JSON, kept in each checkpoint.
        watch: entered; it is told what is being done, and `training.timeout`.
        evaluation_batch_size: rows of a batch of the evaluation text; None = `batch_size`.
        continue_from: a run or checkpoint whose parameters, optimizer and step a new run takes over; its reader starts
            anew and its memory empty (BERT's second phase).
        start_from: a run or checkpoint of which a new run takes the parameters that match in name and shape.
        anew: modules whose parameters it does not take from there.

    Returns `metrics.summary`.

    Raises ValueError for what does not fit together, FileNotFoundError, Diverged, Interrupted after Ctrl-C, and
    Preempted after SIGTERM or SIGUSR1.
    """
    steps, vocabulary, built = training.steps, text.store.vocabulary, optimizer.build(training.steps)
    check_batch(mesh, batch_size, training.accumulation)
    evaluation_rows = evaluation_batch_size or batch_size
    check_batch(mesh, evaluation_rows, name="evaluation_batch_size")
    shapes = prepared_shapes(objective, text.reader, text.store, batch_size)
    abstract = abstract_state(model, built, shapes, mesh, abstract_fixed(objective, shapes, mesh))
    run.mkdir(parents=True, exist_ok=True)
    watch.timeout = training.timeout
    watch.at(0, "start")
    with ExitStack() as stack, watch.telling(stack):
        checkpoints = stack.enter_context(Checkpoints(run, training.keep, training.keep_every))
        watch.at(0, "the checksums of the newest checkpoint")
        latest = checkpoints.newest_whole()
        record = {} if latest is None else checkpoints.record(latest)
        if latest is not None and record[EVALUATED] and ended(run, latest, training):
            return summary(run, latest, record.get(METRICS), training.best)
        display = stack.enter_context(Display(run.name, steps))
        origin = continue_from or start_from
        source = find_checkpoint(origin) if latest is None and origin is not None else None
        watch.at(latest or 0, "the first state" if latest is None else f"the state of step {latest}")
        if latest is not None:
            state, done, reader_start = checkpoints.restore(latest, abstract), latest, record[READER]
            display.log(f"goes on after step {done} of {steps}")
        elif source is not None and continue_from is not None:
            state, done = continued(*source, abstract)
            if done >= steps:
                raise ValueError(f"training steps {steps}: {continue_from} has {done} already, choose more")
            state, reader_start = state._replace(memory=memory_maker(model, batch_size, mesh)()), done
            display.log(f"goes on from {continue_from} after step {done} of {steps}")
        else:
            done, reader_start = 0, 0
            fixed = {} if source is None else teacher_of(*source, abstract.fixed)
            state = init_state(model, built, shapes, mesh, training.seed, fixed)
            if source is not None:
                if fixed:
                    params, rest = taught(objective, fixed, state.params)
                else:
                    params, rest = matching(*source, state.params, anew)
                state = state._replace(params=params)
                display.log(f"starts from {start_from}; new parameters: {', '.join(rest) or 'none'}")

        loader = Loader(
            text.store,
            text.reader,
            batch_size,
            seed=training.seed,
            sharding=batch_sharding(mesh),
            start=done - reader_start,
            transform=loader_transform(objective, text.store, training.seed),
        )
        batches = stack.enter_context(closing(iter(loader)))
        display.log("compiling the train step")
        train_step = make_train_step(
            model,
            objective,
            built,
            vocabulary,
            shardings_of(abstract),
            seed=training.seed,
            accumulation=training.accumulation,
        )
        evaluator = Evaluator(model, objective, mesh, evaluation_text, evaluation_rows, training.evaluate_batches)
        pending = bool(record) and not record[EVALUATED]
        metrics = stack.enter_context(Metrics(run, done, not pending, record.get(METRICS)))
        past = scores((*metrics.evaluations, *checkpoints.evaluations()), training.chooses)
        if training.best is not None:
            checkpoints.retention.scores = past
        meter = Meter(metrics, display, steps, training.log_every, checkpoints.latest)
        stop = stack.enter_context(Stop(mesh).listening())
        stack.enter_context(jax.transfer_guard("disallow"))

        unknown: list[str] = []

        def evaluated(state: TrainState, step: int) -> TrainState:
            """The state that knows how well it did. Raises Asked if the run is to stop meanwhile."""

            def going_on(batches: Iterable[Batch]) -> Iterator[Batch]:
                for batch in batches:
                    watch.at(step, f"the evaluation after step {step}")
                    if stop.started and stop.agreed():
                        raise Asked
                    yield batch

            results = evaluator(variables(built.eval_params(state.params, state.opt_state), state.fixed), going_on)
            metrics.write("evaluation", step, results)
            numbers = "  ".join(
                f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4f}"
                for name, value in results.items()
            )
            display.log(f"step {step}/{steps}  evaluation: {numbers}")
            if training.chooses in results:
                past[step] = score(results, training.chooses)
            elif training.best is not None:
                unknown.append(
                    f"training.best {training.best!r} is no number of the evaluation: choose from {', '.join(results)}"
                )
            return state._replace(opt_state=built.observe(state.opt_state, results["loss"]))

        step = done
        if pending:
            state = evaluated(state, done)
            if unknown:
                raise ValueError(unknown[0])
        last = done if pending and exhausted(past, training.patience) else steps
        watch.at(done, "the first step, which is compiled")
        for step, batch in zip(range(done + 1, last + 1), batches, strict=False):
            state, measured = train_step(state, batch)
            if step == done + 1:
                for operation, path in kernels.paths().items():
                    display.log(f"{operation}: {path}")
            stop.started = True
            meter.push(step, measured)
            watch.at(step, f"step {step}")
            stopping, ending = stop.agreed() > 0, step == steps
            evaluating = ending or due(step, training.evaluate_every)
            saving = ending or any(due(step, n) for n in (training.checkpoint_every, training.keep_every))
            if not (evaluating or saving or stopping):
                continue
            meter.flush()  # so that what is evaluated and saved is known to be finite
            left = evaluating
            if evaluating and not stopping:
                try:
                    state, left = evaluated(state, step), False
                    ending = ending or exhausted(past, training.patience)
                except Asked:
                    stopping = True
            if saving or stopping or ending or (evaluating and training.best is not None):
                watch.at(step, f"saving step {step}, or the save before it")
                metrics.settle()
                about = {"experiment": experiment, READER: reader_start, EVALUATED: not left}
                checkpoints.save(step, state, {**about, METRICS: dict(metrics.last)})
            if unknown:  # the same command with another name goes on from here
                checkpoints.wait()
                raise ValueError(unknown[0])
            if stopping:
                watch.at(step, f"the end of saving step {step}")
                checkpoints.wait()
                kind = Interrupted if stop.asked == SIGINT else Preempted
                raise kind(f"stopped after step {step} of {steps}, which is saved: the same command goes on")
            if ending:
                break
            watch.at(step, f"step {step + 1}")
            meter.restart_clock()
        if step < steps:
            display.log(f"ended early: {training.patience} evaluations in a row were no better than the best")
        watch.at(step, "the end of the last save")
        checkpoints.wait()
        return summary(run, step, metrics.last, training.best)


def ended(run: Path, step: int, training: Training) -> bool:
    """Whether a run that was saved and evaluated after `step` has nothing left to do."""
    lines = [line for line in read_metrics(run) if line["step"] <= step]
    return step >= training.steps or exhausted(scores(lines, training.chooses), training.patience)


class Asked(Exception):
    """The run is to stop, in the middle of an evaluation."""


def continued(run: Path, step: int, abstract: TrainState) -> tuple[TrainState, int]:
    """The state of another run's checkpoint, its memory left abstract, and its step."""
    with Checkpoints(run) as checkpoints:
        return checkpoints.restore(step, abstract, ("params", "fixed", "opt_state")), step


def matching(run: Path, step: int, params: Any, anew: tuple[str, ...]) -> tuple[Any, list[str]]:
    """`Checkpoints.restore_matching` from another run's checkpoint, but for the modules `anew`."""
    own = {name: params[name] for name in anew if name in params}
    with Checkpoints(run) as checkpoints:
        found, rest = checkpoints.restore_matching(step, {name: params[name] for name in params if name not in own})
    return {**found, **own}, [*rest, *own]


def teacher_of(run: Path, step: int, abstract: Any) -> Any:
    """`TrainState.fixed` of a new run: the parameters of another run's checkpoint, where it has a teacher."""
    with Checkpoints(run) as checkpoints:
        return {name: checkpoints.restore_params(step, params) for name, params in abstract.items()}


def taught(objective: Any, fixed: Any, params: Any) -> tuple[Any, list[str]]:
    """`Distillation.student`, each device making its own part."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    rest: list[str] = []

    def student(teacher: Any, params: Any) -> Any:
        found, new = objective.student(teacher, params)
        rest.extend(new)  # known once it is traced
        return found

    return jax.jit(student, out_shardings=shardings)(fixed[TEACHER], params), rest


class Evaluator:
    """One pass over the evaluation text, in order, with a memory of its own; compiled once."""

    def __init__(
        self,
        model: Any,
        objective: Any,
        mesh: jax.sharding.Mesh,
        text: Text,
        batch_size: int,
        batches: int | None = None,
    ) -> None:
        """
        Args:
            batches: how many batches of the pass, from the first on; None = all.
        """
        self.objective, self.text, self.batches = objective, text, batches
        self.init_memory = memory_maker(model, batch_size, mesh)
        self.step = make_eval_step(model, objective, text.store.vocabulary, mesh)
        self.loader = Loader(
            text.store,
            text.reader,
            batch_size,
            seed=None,
            sharding=batch_sharding(mesh),
            transform=loader_transform(objective, text.store, None),
        )

    def __call__(
        self, variables: Variables, through: Callable[[Iterable[Batch]], Iterable[Batch]] = iter
    ) -> dict[str, float]:
        """`evaluation.perplexity.measure` of the pass, whose batches go `through` a function."""
        with closing(iter(self.loader)) as batches:
            sums = accumulate(self.step, variables, self.init_memory(), through(islice(batches, self.batches)))
        return measure(sums, self.objective, self.text.reader, self.text.store)
