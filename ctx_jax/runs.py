"""What is done with an experiment and with the run folder that comes of it: train, evaluate, generate.

RUN/experiment.json (from which the run starts again)  metrics.jsonl  TensorBoard events  checkpoints/  latest (of
them)  report.html
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ctx_jax.contract import Reader, Variables
from ctx_jax.data import hold
from ctx_jax.data.articles import ArticleCorpus, Articles, open_articles
from ctx_jax.data.corpora import Corpus, Split, TextFiles
from ctx_jax.data.loader import Loader
from ctx_jax.data.tfds import Tfds, corpus_from
from ctx_jax.data.tokenizers import Pretrained, Tokenizer
from ctx_jax.evaluation.files import FileTask
from ctx_jax.evaluation.perplexity import evaluate as score
from ctx_jax.experiment import Experiment, load, save
from ctx_jax.generation.beams import NO_SEARCH, Beams
from ctx_jax.generation.decode import generate as continue_prompts
from ctx_jax.generation.sampling import Sampling
from ctx_jax.generation.text import Show, Texts
from ctx_jax.identity import differences, fingerprint
from ctx_jax.objectives.distillation import Distillation
from ctx_jax.parallel.hosts import gather
from ctx_jax.parallel.mesh import Mesh, check_batch
from ctx_jax.parallel.sharding import batch_sharding
from ctx_jax.progress import counted, tell
from ctx_jax.serialization import to_json
from ctx_jax.text import IMPORTED, TOKENIZER, check_text, keep, kept, known_split, open_text, own_tokenizer
from ctx_jax.training import loop
from ctx_jax.training.checkpoints import Checkpoints, begun, find_checkpoint, named
from ctx_jax.training.state import abstract_state, memory_maker, variables
from ctx_jax.training.step import loader_transform, make_eval_step
from ctx_jax.training.stopping import Watch
from ctx_jax.transfer.finetuning import HEAD, completed, open_examples, with_threshold

TOKENS_TO_STOP = 8
"""Tokens from one look for stop strings to the next: what comes after one is lost."""


def train(
    experiment: Experiment,
    run: Path | None = None,
    continue_from: Path | None = None,
    start_from: Path | None = None,
) -> dict[str, Any]:
    """Starts a run, or resumes the one in its folder. Arguments, result and errors as `training.loop.train`.

    A run that goes on from another has that one's tokenizer, whatever its text. What the examples of a task decide is
    part of the experiment that is kept (`finetuning.completed`).

    Raises ValueError, naming what differs, if the folder holds a run of another experiment or text.
    """
    if continue_from is not None and start_from is not None:
        raise ValueError(f"--continue {continue_from} and --from {start_from}: choose one of them")
    if continue_from is not None and (named(continue_from)[0] / IMPORTED).is_file():
        raise ValueError(f"--continue {continue_from}: an imported model has no optimizer state, choose --from")
    experiment = completed(experiment)
    folder = run or Path("runs") / f"{experiment.name}-{fingerprint(experiment)}"
    if isinstance(experiment.objective, Distillation) and not (continue_from or start_from or begun(folder)):
        raise ValueError("objective Distillation needs a teacher: name its run with --from")
    with Watch() as watch, ExitStack() as stack, watch.telling(stack):
        claim(folder, experiment)
        mesh = experiment.mesh.build()
        check_batch(mesh, experiment.data.batch_size, experiment.training.accumulation)
        tokenizer = kept(folder) if begun(folder) else inherited(experiment, continue_from or start_from)
        tokenizer, stores = open_data(experiment, ("train", "validation"), tokenizer)
        ids = tokenizer.vocabulary.size + getattr(experiment.data.corpus, "markers", 0)
        chosen = not (begun(folder) or continue_from or start_from)  # else the network is another run's
        if chosen and ids < (size := experiment.model.vocabulary_size):
            tell(f"note: the tokenizer has {ids:,} of the model's {size:,} ids (model.vocabulary_size)")
        # What is wrong with the held-out text is known before anything is trained.
        rows = experiment.evaluation_batch_size
        experiment.evaluation_reader.batch(stores["validation"], 0, [0], batch_size=rows, seed=None)
        if len(set(gather(int(fingerprint(experiment), 16)))) > 1:  # and every host has looked into the folder
            raise ValueError("the hosts were given different experiments: give all of them the same command and code")
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(alone(folder))
        if (folder / "experiment.json").is_file():
            claim(folder, experiment)  # another process may have had the folder till now
        if jax.process_index() == 0:
            save(experiment, folder / "experiment.json")
        keep(folder, tokenizer, experiment.data.corpus, stores["train"])
        return loop.train(
            model=experiment.model.build(),
            objective=experiment.objective,
            optimizer=experiment.optimizer,
            mesh=mesh,
            text=loop.Text(stores["train"], experiment.data.reader),
            evaluation_text=loop.Text(stores["validation"], experiment.evaluation_reader),
            batch_size=experiment.data.batch_size,
            evaluation_batch_size=experiment.evaluation_batch_size,
            training=experiment.training,
            run=folder,
            experiment=to_json(experiment),
            watch=watch,
            continue_from=continue_from,
            start_from=start_from,
            anew=HEAD if start_from is not None and of_another_task(experiment, start_from) else (),
        )


def open_data(
    experiment: Experiment, splits: tuple[Split, ...], tokenizer: Tokenizer | None
) -> tuple[Tokenizer, dict[Split, Any]]:
    """`open_text`, or the examples of a task, or articles."""
    corpus, size = experiment.data.corpus, experiment.model.vocabulary_size
    if not isinstance(corpus, FileTask | ArticleCorpus):
        return open_text(experiment.data, splits, tokenizer)
    tokenizer = tokenizer or own_tokenizer(experiment.data)
    if isinstance(corpus, ArticleCorpus):
        return tokenizer, {split: open_articles(corpus, split, tokenizer, size) for split in splits}
    return tokenizer, open_examples(experiment, splits, tokenizer)


def of_another_task(experiment: Experiment, source: Path) -> bool:
    """Whether this is a task, and that run's head was for another one, or for none."""
    theirs, ours = load(named(source)[0] / "experiment.json").data.corpus, experiment.data.corpus
    return isinstance(ours, FileTask) and not (isinstance(theirs, FileTask) and theirs.meaning == ours.meaning)


def inherited(experiment: Experiment, old: Path | None) -> Tokenizer | None:
    """The tokenizer of the run that this one goes on from, if any: the embeddings mean its ids. Raises ValueError if
    the experiment asks for another one."""
    if old is None:
        return None
    folder, _ = named(old)
    tokenizer, own = kept(folder), experiment.data.tokenizer
    theirs, mine = (to_json(config) for config in (load(folder / "experiment.json").data.tokenizer, own))
    same = isinstance(own, Pretrained) and own.load(Path(own.path)).fingerprint == tokenizer.fingerprint
    if theirs != mine and not same:
        raise ValueError(
            f"{old} has another tokenizer (data.tokenizer {theirs} -> {mine}), and its embeddings mean that one's ids: "
            f"choose the same, or --tokenizer {folder / TOKENIZER}"
        )
    return tokenizer


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Raises ValueError if another process trains in the folder (the kernel drops the lock of one that dies)."""
    if jax.process_index() > 0:
        yield
        return
    with (folder / ".lock").open("w") as lock:
        try:
            hold(lock, wait=False)
        except BlockingIOError:
            raise ValueError(
                f"{folder} is being trained by another process: wait for it or choose another --run"
            ) from None
        yield


def claim(folder: Path, experiment: Experiment) -> None:
    """Raises ValueError if the folder holds anything but a run of this experiment, or one that was never begun; what
    may still be lost of a run is left as it is."""
    file = folder / "experiment.json"
    if (folder / IMPORTED).is_file():
        raise ValueError(f"{folder} holds an imported model: train from it into another folder, --from {folder} --run")
    if file.is_file() and not begun(folder):
        return
    if file.is_file():
        changed = differences(load(file), experiment)
        if changed:
            raise ValueError(
                f"{folder} holds a run of another experiment ({'; '.join(changed[:3])}): choose another --run, "
                f"or begin a new one from it with --continue {folder} or --from {folder}"
            )
    elif begun(folder):
        raise ValueError(
            f"{folder} has lost its experiment.json: put it back (the record of each checkpoint holds it), or choose "
            "another --run"
        )
    elif folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty and holds no run: choose another --run")


class Trained(NamedTuple):
    """A run's checkpoint, ready to be used."""

    experiment: Experiment
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh
    model: Any
    variables: Variables
    step: int


def open_run(path: Path, checkpoint: str = "last", **settings: Any) -> Trained:
    """The run in `path` (its folder, or one of its checkpoints), with its own tokenizer.

    Args:
        checkpoint: "last", "best" (by the run's `training.best`, or the loss) or a step.
        settings: fields of the model's config to be replaced, which must leave its parameters as they are; None = as
            it was trained.

    Raises FileNotFoundError without a checkpoint, ValueError for a setting that the model does not have.
    """
    folder, _ = named(path)
    experiment = load(folder / "experiment.json")
    _, step = find_checkpoint(path, checkpoint, experiment.training.best or "loss")
    experiment = replace(experiment, model=with_settings(experiment.model, settings))
    mesh = built(experiment.mesh)
    model, optimizer = experiment.model.build(), experiment.optimizer.build(experiment.training.steps)
    size = divisible_rows(mesh, experiment.evaluation_batch_size), experiment.evaluation_reader.length
    rows = dict.fromkeys(("tokens", "documents", "positions"), jax.ShapeDtypeStruct(size, jnp.int32))
    abstract = abstract_state(model, optimizer, rows, mesh)
    with Checkpoints(folder) as checkpoints:
        params = checkpoints.restore_params(step, abstract.params)
    tokenizer = kept(folder)
    return Trained(experiment, tokenizer, mesh, model, variables(params, {}), step)


def built(mesh: Mesh) -> jax.sharding.Mesh:
    """The mesh or, where a run is used on other devices than it was trained on, one that fits them: what is computed
    does not depend on it."""
    try:
        return mesh.build()
    except ValueError:
        found = mesh.fitted(len(jax.devices())).build()
        sizes = " ".join(f"{name}={size}" for name, size in found.shape.items())
        tell(f"note: the run's mesh ({mesh.describe()}) does not fit {len(jax.devices())} devices: {sizes} is used")
        return found


def with_settings(config: Any, settings: dict[str, Any]) -> Any:
    """The model's config with every setting that is not None (or False, for a flag)."""
    chosen = {name: value for name, value in settings.items() if value is not None and value is not False}
    known = [field.name for field in fields(config)]
    for name in chosen:
        if name not in known:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option}: {type(config).__name__} has no {name}, leave the option out")
    return replace(config, **chosen)


def divisible_rows(mesh: jax.sharding.Mesh, rows: int) -> int:
    """The smallest number of rows, at least `rows`, that divides over the mesh."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    return -(-rows // parts) * parts


def evaluate(
    path: Path,
    *,
    text: str | None = None,
    split: str = "test",
    length: int | None = None,
    stride: int | None = None,
    memory_length: int | None = None,
    same_length: bool = False,
    clamp_length: int | None = None,
    batch_size: int | None = None,
    checkpoint: str = "last",
    threshold: float | None = None,
) -> dict[str, Any]:
    """Scores a split, or other text, with a run's checkpoint: each token once, the reading declared.

    Arguments as `cli.Evaluate`. Returns `evaluation.perplexity.evaluate` with "run", "step" and "split" or "text".
    """
    part = known_split(split)
    if text is None and (named(path)[0] / IMPORTED).is_file():
        raise ValueError(f"{path} is an imported model, which holds out no text: name what to score with --text")
    settings = {"memory_length": memory_length, "same_length": same_length, "clamp_length": clamp_length}
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"--batch-size {batch_size} is not a number of rows: choose 1 or more")
    trained = open_run(path, checkpoint, **settings)
    reader, mesh = reread(trained.experiment.evaluation_reader, length, stride), trained.mesh
    # Anew, so that all is checked that must fit each other.
    experiment = replace(trained.experiment, data=replace(trained.experiment.data, evaluation_reader=reader))
    data = experiment.data if text is None else replace(experiment.data, corpus=whole(text, experiment.data.corpus))
    if threshold is not None:
        data = replace(data, corpus=with_threshold(data.corpus, threshold))
    store = open_data(replace(experiment, data=replace(data, reader=reader)), (part,), trained.tokenizer)[1][part]
    if text is None:
        check_text(named(path)[0], store)
    rows = divisible_rows(mesh, batch_size or experiment.evaluation_batch_size)
    transform = loader_transform(experiment.objective, store, None)
    step = make_eval_step(trained.model, experiment.objective, store.vocabulary, mesh)
    memory = memory_maker(trained.model, rows, mesh)()
    loader = Loader(store, reader, rows, None, batch_sharding(mesh), transform=transform)
    with closing(iter(loader)) as batches:
        result = score(
            step,
            trained.variables,
            memory,
            counted("evaluating", batches, reader.passes(store, rows)),
            objective=experiment.objective,
            reader=reader,
            store=store,
            memory_length=getattr(experiment.model, "memory_length", 0),
        )
    chosen = {name: getattr(experiment.model, name) for name in settings if hasattr(experiment.model, name)}
    source = {"split": split} if text is None else {"text": text}
    return {"run": str(path), "step": trained.step, **source, "streams": rows, **chosen, **result}


def whole(text: str, corpus: Corpus) -> Corpus:
    """The corpus that --text names, nothing of it held out, read as `corpus` is where that is of the same kind."""
    if isinstance(corpus, FileTask):
        return replace(corpus, path=text, validation=None, test=None, whole=True)
    if isinstance(corpus, ArticleCorpus):
        return Articles(path=text, fields=corpus.fields, whole=True, language=corpus.language)
    named = corpus_from(text)
    if isinstance(named, Tfds):
        like = corpus if isinstance(corpus, Tfds) else named
        return replace(like, name=named.name, validation=None, test=None, whole=True)
    like = corpus if isinstance(corpus, TextFiles) else named
    return replace(like, path=named.path, validation=None, test=None, whole=True)


def reread(reader: Reader, length: int | None, stride: int | None) -> Reader:
    """The reader with another window. Raises ValueError if it has no stride and one is asked for."""
    if stride is not None and not hasattr(reader, "stride"):
        raise ValueError(f"--stride: {type(reader).__name__} has no stride, leave the option out")
    chosen: dict[str, Any] = {"length": length, "stride": stride}
    return replace(reader, **{name: value for name, value in chosen.items() if value is not None})  # pyright: ignore[reportArgumentType]


def generate(
    path: Path,
    prompts: tuple[str, ...],
    length: int,
    sampling: Sampling,
    seed: int,
    checkpoint: str = "last",
    search: Beams = NO_SEARCH,
    stop: tuple[str, ...] = (),
    window: int | None = None,
    show: Show | None = None,
) -> dict[str, Any]:
    """Continues the prompts with a run's checkpoint. Returns {"run", "step", "texts"}, prompts included, each text cut
    before the first of the stop strings that is generated (in beam search that of the most probable text, which knows
    nothing of them); `show` is given the same texts while they grow."""
    if search.beams > 1 and (window or show):
        raise ValueError(
            f"--beams {search.beams}: beam search knows its text at the end only, and reads none of it anew: leave out "
            "--stream and --window"
        )
    trained = open_run(path, checkpoint)
    vocabulary = trained.tokenizer.vocabulary
    for prompt in prompts:
        if not prompt.isprintable() and any(0xD800 <= ord(character) <= 0xDFFF for character in prompt):
            raise ValueError(f"--prompt {prompt!r} is not UTF-8: give it in that encoding")
    ids = [trained.tokenizer.encode(prompt).ids.tolist() for prompt in prompts]
    texts = Texts(trained.tokenizer, ids, stop, show)
    continuations = continue_prompts(
        trained.model,
        trained.variables,
        vocabulary,
        [[vocabulary.begin, *prompt] for prompt in ids],
        length=length,
        sampling=sampling,
        seed=seed,
        search=search,
        window=window,
        watch=texts.watch if (stop or show) and search.beams == 1 else None,
        every=1 if show else TOKENS_TO_STOP,
    )
    return {"run": str(path), "step": trained.step, "texts": texts.finish(continuations)}
