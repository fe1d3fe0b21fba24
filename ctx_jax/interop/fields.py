"""A foreign config.json, read field by field: what is not understood is an error, never a guess."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

GENERIC = frozenset(
    # who wrote it, with what, and how it is run
    """_name_or_path architectures model_type transformers_version torch_dtype dtype use_cache output_attentions
    output_hidden_states output_past return_dict torchscript tf_legacy_loss use_bfloat16 chunk_size_feed_forward
    gradient_checkpointing attn_implementation _attn_implementation _attn_implementation_autoset tokenizer_class"""
    # the start of training
    """ initializer_range init init_range init_std proj_init_std"""
    # tasks: labels are read where there is a head for them; their dropout belongs to fine-tuning
    """ finetuning_task task_specific_params problem_type id2label label2id num_labels classifier_dropout
    seq_classif_dropout qa_dropout summary_first_dropout summary_last_dropout start_n_top end_n_top"""
    # tokens and generation
    """ pad_token_id bos_token_id eos_token_id sep_token_id cls_token_id mask_token_id unk_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id bad_words_ids suppress_tokens begin_suppress_tokens
    prefix min_length max_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k
    top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    num_return_sequences output_scores return_dict_in_generate exponential_decay_length_penalty
    remove_invalid_values""".split()
)
"""Fields that any config.json may have and that do not change what the network computes."""
MISSING: Any = object()


class Fields:
    """The fields of one config.json; each is asked for once, and `finish` refuses what nobody asked for."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where
        self.asked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def raw(self, name: str, default: Any = MISSING) -> Any:
        """The field as it stands there; raises ValueError if it is needed (no default) and missing."""
        self.asked.add(name)
        value = self.values.get(name, default)
        if value is MISSING:
            raise ValueError(f"{self.where} lacks {name!r}, which this kind of model needs")
        return value

    def refuse(self, name: str, wanted: str) -> ValueError:
        """The error for a field whose value cannot be honoured."""
        return ValueError(f"{self.where}: {name} {self.values.get(name)!r} cannot be honoured: this model {wanted}")

    def integer(self, name: str, default: Any = MISSING) -> int:
        value = self.raw(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**31:
            raise self.refuse(name, "needs a whole number there, below 2^31")
        return value

    def size(self, name: str, default: Any = MISSING) -> int:
        value = self.integer(name, default)
        if value < 1:
            raise self.refuse(name, "needs 1 or more there")
        return value

    def number(self, name: str, default: Any = MISSING) -> float:
        value = self.raw(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(name, "needs a number there")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "needs true or false there")
        return value

    def choice(self, name: str, choices: Mapping[Any, Any], default: Any) -> Any:
        """What the field's value is called here."""
        value = self.raw(name, default)
        if not isinstance(value, str | int | bool | None) or value not in choices:
            raise self.refuse(name, f"has {', '.join(map(str, choices))}")
        return choices[value]

    def only(self, **expected: Any) -> None:
        """Fields that may be absent, or must have the one value that the network implements."""
        for name, value in expected.items():
            if self.raw(name, value) != value:
                raise self.refuse(name, f"has {json.dumps(value)}")

    def same(self, name: str, value: Any, default: Any, of: str) -> None:
        """A second field that must agree with one that is read."""
        if self.raw(name, default) not in (None, value):
            raise self.refuse(name, f"has one such rate or size, and {of} is {value!r}")

    def labels(self) -> tuple[str, ...] | None:
        """The names of a task head's labels by their ids, if there are any."""
        names = self.raw("id2label", None)
        if not names:
            return None
        if isinstance(names, dict):
            found: list[Any] = [names.get(str(index)) for index in range(len(names))]
            if all(isinstance(name, str) for name in found):
                return tuple(found)
        raise ValueError(
            f'{self.where}: id2label must give a name to each id from 0 on, as {{"0": "no", "1": "yes"}}: mend it'
        )

    def names(self, name: str) -> list[str]:
        """A list of names; empty without."""
        value = self.raw(name, None) or []
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.refuse(name, "needs a list of names there")
        return value

    def classes(self) -> int:
        """How many labels the task head has (Hugging Face counts their names)."""
        names = self.labels()
        return self.integer("num_labels", 2) if names is None else len(names)

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Refuses fields that nobody asked for, unless they are known to change nothing or are off."""
        off = (None, False, {}, [], "")
        for name, value in self.values.items():
            if name not in self.asked and name not in GENERIC and name not in ignored and value not in off:
                raise ValueError(
                    f"{self.where}: {name} {value!r} is not known, and it may change what the model computes: delete "
                    "the line if it does not"
                )


def read_fields(path: Path) -> Fields:
    """The fields of a config.json; raises FileNotFoundError or ValueError with one line."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: it must name the model_type (bert, gpt2, transfo-xl, ...) and its sizes, as in the "
            "folders that transformers writes (beside TensorFlow's checkpoints: bert_config.json, xlnet_config.json)"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): mend or fetch it again") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a JSON object: mend or fetch it again")
    return Fields(values, str(path))


def their_name(choices: Mapping[str, str], value: str, name: str, model: str) -> str:
    """The first of their names for our value; raises ValueError if they have none."""
    for theirs, ours in choices.items():
        if ours == value:
            return theirs
    known = ", ".join(dict.fromkeys(choices.values()))
    raise ValueError(f"{name} {value!r} cannot be exported: {model} has {known}")
