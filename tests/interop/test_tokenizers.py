"""Published tokenizers: the ids of the originals, and what is made of which files."""

from __future__ import annotations

import functools
import itertools
import json
import pickle
import re
import shutil
import unicodedata
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from ctx_jax.data.corpora import Sotu, documents
from ctx_jax.data.published import PublishedByteBPE, PublishedWordBPE, PublishedWordPiece, cleaned
from ctx_jax.data.sentencepieces import SentencePiece
from ctx_jax.data.subwords import ByteLevelBPE, WordPiece
from ctx_jax.data.symbols import Bytes
from ctx_jax.data.tokenizers import load_tokenizer
from ctx_jax.interop.pickles import OLD_MAGIC
from ctx_jax.interop.tokenizers import export_tokenizer, import_tokenizer
from tests.golden.hard_lines import hard_lines
from tests.golden.published import FAMILIES, HERE, write_family, write_pairs

RECORDED = json.loads((HERE / "ids.json").read_text())
OWN = {
    "wordpiece": WordPiece(vocabulary_size=500, lowercase=False),
    "byte_bpe": ByteLevelBPE(vocabulary_size=500, normalization="NFC"),
    "unigram": SentencePiece(vocabulary_size=400),
    "bpe": SentencePiece(vocabulary_size=400, model_type="bpe"),
}


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """The folder of a family, and our tokenizer of it."""
    root = tmp_path_factory.mktemp("published")

    @functools.cache
    def make(family: str):
        write_family(family, root / family)
        return root / family, import_tokenizer(root / family, root / f"{family}-ours")

    return make


def original_folder(name: str, folder: Path) -> Path:
    """The files that the records were made with, without Hugging Face's."""
    shutil.copytree(HERE / name.partition("_")[0], folder)
    return folder


@pytest.mark.parametrize("name", RECORDED)
def test_ids_are_those_of_the_original(tmp_path, name):
    folder = original_folder(name, tmp_path / "theirs")
    lowercase = {"bert_uncased": True, "bert_cased": False}.get(name)
    tokenizer = import_tokenizer(folder, tmp_path / "ours", lowercase)
    lines = hard_lines(len(RECORDED[name]))
    assert [tokenizer.encode(line).ids.tolist() for line in lines] == RECORDED[name]
    known = sum(index != tokenizer.vocabulary.unknown for line in RECORDED[name] for index in line)
    assert known > 0.75 * sum(map(len, RECORDED[name]))


def xlnet_ids(own: sentencepiece.SentencePieceProcessor, text: str, lowercase: bool) -> list[int]:
    """What XLNet does before and after SentencePiece, a step at a time."""
    text = " ".join(text.split()).replace("``", '"').replace("''", '"')
    text = "".join(c for c in unicodedata.normalize("NFKD", text) if unicodedata.combining(c) == 0)
    pieces = []
    for piece in own.encode(text.lower() if lowercase else text, out_type=str):
        if piece.endswith(",") and piece[-2:-1].isdigit():
            again = own.encode(piece[:-1].replace("▁", ""), out_type=str)
            if piece[0] != "▁":
                again = [again[0][1:], *again[1:]]
            pieces += [part for part in again if part] + [","]
        else:
            pieces.append(piece)
    return [own.piece_to_id(piece) for piece in pieces]


@pytest.mark.parametrize("family", ["t5", "xlnet", "xlnet_uncased"])
def test_ids_are_those_of_sentencepiece(published, family):
    folder, tokenizer = published(family)
    own = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    commas = 0
    for line in hard_lines(2000, seed=4):
        parts = line.split("\n")
        if family == "t5":
            expected = own.encode(parts)
        else:
            expected = [xlnet_ids(own, part, family == "xlnet_uncased") for part in parts]
            commas += sum(ids != own.encode(part) for ids, part in zip(expected, parts, strict=True))
        encoding = tokenizer.encode(line)
        assert encoding.ids.tolist() == [index for ids in expected for index in ids]
        text = tokenizer.decode(encoding.ids)
        if tokenizer.vocabulary.unknown not in encoding.ids:
            assert text == encoding.text.removeprefix(" ")
        assert len(text.split(" ")) == len(encoding.text.removeprefix(" ").split(" "))
        assert encoding.word_starts().sum() == len(encoding.text.split())
    assert (commas > 100) == (family != "t5")


def test_a_digit_and_its_comma_are_two_pieces(published):
    _, tokenizer = published("xlnet")
    pieces = [tokenizer.piece(index) for index in tokenizer.encode("In 1999, they").ids]
    assert "," in pieces
    assert "".join(pieces) == "▁In▁1999,▁they"
    assert tokenizer.encode("a  b\u3000``c''é").text == 'a b "c"e'


def naive_gpt(ids: dict[str, int], merges: list[str], words: list[str]) -> list[int]:
    """Byte-pair encoding as first written down: the best pair of all, everywhere, again and again."""
    ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(merges)}
    found = []
    for word in words:
        parts = [*word[:-1], f"{word[-1]}</w>"]
        while pairs := [pair for pair in itertools.pairwise(parts) if pair in ranks]:
            best, at = min(pairs, key=ranks.__getitem__), 0
            while at < len(parts) - 1:
                if (parts[at], parts[at + 1]) == best:
                    parts[at : at + 2] = ["".join(best)]
                at += 1
        found += [ids.get(part, ids["<unk>"]) for part in parts]
    return found


def test_gpt_is_byte_pairs_of_berts_words(published):
    folder, tokenizer = published("gpt")
    ids = json.loads((folder / "vocab.json").read_text())
    merges = (folder / "merges.txt").read_text().split("\n")[1:-1]
    for line in hard_lines(600, seed=5):
        words = []
        for word in cleaned(line).split():
            words += [part for part, _ in tokenizer._parts(word)]
        assert tokenizer.encode(line).ids.tolist() == naive_gpt(ids, merges, words)
    assert tokenizer.decode(tokenizer.encode("The PEOPLE, of\nthe").ids) == "the people , of the"
    assert tokenizer.normalize("a\u4e00\u0bb5b c") == "a <unk> <unk> b c"


def test_special_ids_of_each_family(published):
    def special(family):
        vocabulary, piece = published(family)[1].vocabulary, published(family)[1].piece
        names = ("pad", "unknown", "begin", "end", "classification", "separator", "mask")
        return " ".join(repr(piece(getattr(vocabulary, name)))[1:-1] for name in names)

    assert special("bert") == "[PAD] [UNK] [CLS] [SEP] [CLS] [SEP] [MASK]"
    assert special("gpt2") == " ".join(["<|endoftext|>"] * 7)
    assert special("roberta") == "<pad> <unk> <s> </s> <s> </s> <mask>"
    assert special("xlnet") == "<pad> <unk> <eod> <eod> <cls> <sep> <mask>"
    assert special("t5") == "<pad> <unk> </s> </s> </s> </s> </s>"
    end = "\\n</w>"
    assert special("gpt") == f"{end} <unk> {end} {end} {end} {end} {end}"


def test_casing(tmp_path):
    pieces = "[PAD] [UNK] [CLS] [SEP] [MASK] a b é".split()
    number = iter(range(100))

    def made(pieces: list[str], lowercase: bool | None = None, **settings):
        folder, output = tmp_path / f"{next(number)}", tmp_path / f"{next(number)}"
        folder.mkdir()
        (folder / "vocab.txt").write_text("\r\n".join(pieces) + "\r\n")
        if settings:
            (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        tokenizer = import_tokenizer(folder, output, lowercase)
        return tokenizer.config, tokenizer.normalize("A é一")

    config, text = made(pieces)
    assert (config.lowercase, config.strip_accents, config.longest_word) == (True, True, 200)
    assert text == "a [UNK] [UNK]"
    config, text = made([*pieces, "A"])
    assert (config.lowercase, config.strip_accents, config.chinese) == (False, False, True)
    assert text == "A é [UNK]"
    assert made([*pieces, "A"], lowercase=True)[0].lowercase
    config, text = made(pieces, do_lower_case=True, strip_accents=False, tokenize_chinese_chars=False)
    assert (config.strip_accents, config.chinese, config.longest_word) == (False, False, 100)
    assert text == "a [UNK]"
    assert made([*pieces, "A"], do_lower_case=True)[0].lowercase
    assert not made([*pieces, "A"], lowercase=False, do_lower_case=True)[0].lowercase


def test_words_are_known_up_to_200_characters(tmp_path):
    tokenizer = import_tokenizer(original_folder("bert_uncased", tmp_path / "theirs"), tmp_path / "ours")
    unknown = tokenizer.vocabulary.unknown
    assert unknown not in tokenizer.encode("a" * 200).ids
    assert tokenizer.encode("a" * 201).ids.tolist() == [unknown]


def test_what_bert_drops_is_no_white_space(published):
    _, tokenizer = published("bert")
    assert tokenizer.encode("th\x1ce\x85 a\x0bb").text == "the ab"
    assert tokenizer.encode("th\x1ce").ids.tolist() == tokenizer.encode("the").ids.tolist()
    encoding = tokenizer.encode("É [MASK]\u2028don't")
    assert encoding.starts[encoding.word_starts()].tolist() == [0, 2, 9]


def test_names_of_the_original_files(tmp_path, published):
    folder, tokenizer = published("gpt2")
    (tmp_path / "theirs").mkdir()
    shutil.copy(folder / "vocab.json", tmp_path / "theirs" / "encoder.json")
    shutil.copy(folder / "merges.txt", tmp_path / "theirs" / "vocab.bpe")
    again = import_tokenizer(tmp_path / "theirs", tmp_path / "ours")
    assert again.fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize("family", FAMILIES)
def test_exported_tokenizers_come_back_the_same(published, tmp_path, family):
    _, tokenizer = published(family)
    export_tokenizer(tokenizer, tmp_path / "theirs")
    again = import_tokenizer(tmp_path / "theirs", tmp_path / "ours")
    assert again.config == tokenizer.config
    assert again.fingerprint == tokenizer.fingerprint
    if family in ("bert", "bert_cased", "gpt", "gpt2", "roberta"):  # from tokenizer.json alone, too
        for file in (tmp_path / "theirs").iterdir():
            if file.name not in ("tokenizer.json", "tokenizer_config.json"):
                file.unlink()
        alone = import_tokenizer(tmp_path / "theirs", tmp_path / "alone")
        assert alone.config == tokenizer.config
        for line in hard_lines(100, seed=6):
            assert alone.encode(line).ids.tolist() == tokenizer.encode(line).ids.tolist()


@pytest.mark.parametrize("name", OWN)
def test_tokenizers_that_were_trained_here_come_back_the_same(tmp_path, name):
    speech = next(documents(Sotu().passages("train")))
    tokenizer = OWN[name].train([speech], tmp_path / "trained")
    export_tokenizer(tokenizer, tmp_path / "theirs")
    settings = json.loads((tmp_path / "theirs" / "tokenizer_config.json").read_text())
    assert settings["mask_token"] == tokenizer.piece(tokenizer.vocabulary.mask)
    assert (tmp_path / "theirs" / "tokenizer.json").is_file()
    again = import_tokenizer(tmp_path / "theirs", tmp_path / "ours")
    assert again.fingerprint == tokenizer.fingerprint
    assert load_tokenizer(tmp_path / "ours").vocabulary == tokenizer.vocabulary


def test_what_cannot_be_exported(tmp_path):
    tokenizer = Bytes().train([], tmp_path / "bytes")
    with pytest.raises(ValueError, match=r"BytesTokenizer .* cannot be exported: transformers has nothing like it"):
        export_tokenizer(tokenizer, tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_added_tokens(published, tmp_path):
    folder = tmp_path / "theirs"
    shutil.copytree(published("gpt2")[0], folder)
    size = published("gpt2")[1].vocabulary.size
    entries = {str(size): {"content": "[PAD]", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": entries, "pad_token": "[PAD]"}))
    tokenizer = import_tokenizer(folder, tmp_path / "ours")
    assert (tokenizer.vocabulary.size, tokenizer.vocabulary.pad) == (size + 1, size)
    assert tokenizer.piece(size) == "[PAD]"
    assert tokenizer.decode([*tokenizer.encode("the [PAD]").ids, size]) == "the [PAD]"
    for wrong in ({"content": "hello", "special": False}, {"content": "[X]", "special": True}):
        entries = {str(size + wrong["special"]): wrong}
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": entries}))
        with pytest.raises(ValueError, match=r"added token '.*' with id \d+ cannot be used: only special"):
            import_tokenizer(folder, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_special_pieces_are_no_text(tmp_path):
    pieces = "[PAD] [UNK] [CLS] [SEP] [MASK] a b mask".split()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "vocab.txt").write_text("\n".join(pieces) + "\n")
    (tmp_path / "theirs" / "tokenizer_config.json").write_text('{"mask_token": "mask"}')
    with pytest.raises(ValueError, match=r"special piece 'mask' of .* can be made of text: name one that cannot"):
        import_tokenizer(tmp_path / "theirs", tmp_path / "ours")


def test_foreign_components_are_named(published, tmp_path):
    export_tokenizer(published("roberta")[1], tmp_path / "roberta")
    export_tokenizer(published("bert")[1], tmp_path / "bert")
    contents = {name: json.loads((tmp_path / name / "tokenizer.json").read_text()) for name in ("roberta", "bert")}
    number = iter(range(100))

    def refused(content: object, message: str) -> None:
        folder = tmp_path / f"wrong-{next(number)}"
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message) as error:
            import_tokenizer(folder, tmp_path / "ours")
        assert "\n" not in str(error.value)

    def changed(name: str, component: str, **values: object) -> dict:
        return {**contents[name], component: {**(contents[name][component] or {}), **values}}

    refused(changed("roberta", "pre_tokenizer", add_prefix_space=True), "pre_tokenizer add_prefix_space true is not")
    refused(changed("roberta", "pre_tokenizer", type="Whitespace"), 'pre_tokenizer type "Whitespace" is not known')
    refused(changed("roberta", "normalizer", type="NFC"), "normalizer .* is not known here: it must be null")
    refused(changed("roberta", "model", byte_fallback=True), "model byte_fallback true is not known")
    refused(changed("bert", "normalizer", type="Lowercase"), 'normalizer type "Lowercase" is not known')
    refused(changed("bert", "model", type="Unigram"), "give spiece.model")
    refused(changed("bert", "model", type="WordLevel"), 'model "WordLevel" is not known here: it must be')
    refused([], "is not a JSON object")
    with pytest.raises(FileNotFoundError, match=r"no tokenizer in .*: it needs vocab.txt, vocab.json"):
        import_tokenizer(tmp_path / "nothing", tmp_path / "ours")


def test_files_that_miss_what_is_needed(published, tmp_path):
    write_pairs_of = functools.partial(write_pairs, merges="#version: 0.2\na b")
    (tmp_path / "few").mkdir()
    write_pairs_of(tmp_path / "few", ["<s>", "</s>", "<unk>", "<pad>", "<mask>", "a", "b", "ab"])
    with pytest.raises(ValueError, match=r"vocab.json cannot be read \(the byte '.' is missing\)"):
        import_tokenizer(tmp_path / "few", tmp_path / "ours")
    (tmp_path / "gpt").mkdir()
    write_pairs_of(tmp_path / "gpt", ["<unk>", "a", "b", "ab", "a</w>"])
    with pytest.raises(ValueError, match=r"has no piece for eos_token .*: name one in tokenizer_config.json"):
        import_tokenizer(tmp_path / "gpt", tmp_path / "ours")
    (tmp_path / "bytes").mkdir()
    SentencePiece(vocabulary_size=400).train([next(documents(Sotu().passages("train")))], tmp_path / "own")
    shutil.copy(tmp_path / "own" / "sentencepiece.model", tmp_path / "bytes" / "spiece.model")
    with pytest.raises(ValueError, match="cannot be used: it has byte pieces"):
        import_tokenizer(tmp_path / "bytes", tmp_path / "ours")


def test_configs_are_tokenizer_configs(published):
    for family, kind in (("bert", PublishedWordPiece), ("gpt", PublishedWordBPE), ("gpt2", PublishedByteBPE)):
        _, tokenizer = published(family)
        assert isinstance(tokenizer.config, kind)
        again = tokenizer.config.train(iter([]), tokenizer.folder)
        assert again.fingerprint == tokenizer.fingerprint
        assert np.array_equal(again.encode("the people").ids, tokenizer.encode("the people").ids)


class Evil:
    """Would run code when it is unpickled; here nothing is done."""

    def __reduce__(self):
        return print, ("unpickled",)


def pickled_words(folder: Path, layout: str) -> Path:
    """A folder with Transformer-XL's vocabulary as its class's fields, in one of the layouts of its history."""
    words = ["<eos>", "the", "<unk>", "of", "Union", "=", "1,000", "<pad>"]
    fields = {
        "counter": Counter(words),
        "sym2idx": OrderedDict((word, index) for index, word in enumerate(words)),
        "idx2sym": words,
        "lower_case": False,
        "regex": re.compile("a"),
        "moses": Evil(),
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "transfo-xl"}))
    match layout:
        case "plain":
            (folder / "vocab.pkl").write_bytes(pickle.dumps(fields))
        case "before 1.6":
            parts = (OLD_MAGIC, 1001, {}, fields, [])
            (folder / "vocab.bin").write_bytes(b"".join(pickle.dumps(part, 2) for part in parts))
        case "zip":
            with zipfile.ZipFile(folder / "vocab.bin", "w") as archive:
                archive.writestr("vocab/data.pkl", pickle.dumps(fields, 2))
        case "text":
            (folder / "vocab.txt").write_text("".join(f"{word} 17\n" for word in words))
    return folder


@pytest.mark.parametrize("layout", ["plain", "before 1.6", "zip", "text"])
def test_words_of_transformer_xl(tmp_path, layout, capsys):
    tokenizer = import_tokenizer(pickled_words(tmp_path / "theirs", layout), tmp_path / "ours")
    assert capsys.readouterr().out == ""  # nothing of the pickle was run
    vocabulary = tokenizer.vocabulary
    assert (vocabulary.size, vocabulary.unknown, vocabulary.begin, vocabulary.end, vocabulary.pad) == (8, 2, 0, 0, 0)
    encoding = tokenizer.encode("= the Union =\n\n the <unk> of\x0b1,000 <eos> Unions\r")
    assert encoding.ids.tolist() == [5, 1, 4, 5, 0, 0, 1, 2, 3, 6, 2, 2]  # what looks like a line's end is text
    assert encoding.word_starts().tolist() == [True] * 4 + [False] * 2 + [True] * 6
    assert tokenizer.decode(encoding.ids) == "= the Union =\n\nthe <unk> of 1,000 <unk> <unk>"
    assert [tokenizer.piece(index) for index in (0, 2, 4)] == ["<eos>", "<unk>", "Union"]
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.fingerprint == tokenizer.fingerprint == load_tokenizer(tmp_path / "ours").fingerprint
    with pytest.raises(ValueError, match="PublishedWords"):
        export_tokenizer(tokenizer, tmp_path / "back")


def test_vocabularies_of_transformer_xl_that_are_none(tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "transfo-xl"}))
    with pytest.raises(FileNotFoundError, match=r"is vocab\.bin, vocab\.pkl or vocab\.txt"):
        import_tokenizer(folder, tmp_path / "ours")
    for content, message in (
        (pickle.dumps({"idx2sym": Evil()}), "it has no list of words, idx2sym"),
        (pickle.dumps(["<eos>"]), "holds no dictionary"),
        (b"\x80\x04no", r"not a pickle that can be read \(.*\): fetch it again"),
        (pickle.dumps({"idx2sym": ["the", "<unk>"]}), r"no piece for eos_token \('<eos>'\)"),
        (pickle.dumps({"idx2sym": ["<eos>", "<unk>", "the", "the"]}), "an entry stands there twice"),
    ):
        (folder / "vocab.pkl").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            import_tokenizer(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tokenizer_class": 5}, "tokenizer_class 5 is no str"),
        ({"added_tokens_decoder": [1]}, r"added_tokens_decoder \[1\] is no dict"),
        ({"max_input_chars_per_word": "x"}, "max_input_chars_per_word 'x' is no int"),
        ({"pad_token": ["x"]}, r"\['x'\] among the special tokens is no text"),
    ],
)
def test_settings_of_another_type_are_named(settings, told, tmp_path):
    write_family("bert", tmp_path / "theirs")
    file = tmp_path / "theirs/tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(ValueError, match=told):
        import_tokenizer(tmp_path / "theirs", tmp_path / "ours")


def test_a_vocabulary_with_a_byte_order_mark_is_refused(tmp_path):
    write_family("bert", tmp_path / "theirs")
    file = tmp_path / "theirs/vocab.txt"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    with pytest.raises(ValueError, match=r"vocab\.txt begins with a byte-order mark"):
        import_tokenizer(tmp_path / "theirs", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
