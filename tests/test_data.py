"""Corpora: what is prepared, read and refused."""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from data import prepare as p

ROOT = Path(__file__).resolve().parent.parent


def test_the_standard_library_is_prepared_the_same_way_twice(tmp_path):
    metas = [p.prepare("stdlib", out=tmp_path / n) for n in ("a", "b")]
    assert metas[0] == metas[1] and metas[0]["files"] > 100
    train, val = (np.fromfile(tmp_path / "a" / f"{s}.bin", np.uint16) for s in ("train", "val"))
    assert len(train) + len(val) == metas[0]["bytes"] and train.max() < 256
    digest = hashlib.sha256(train.astype(np.uint8).tobytes() + val.astype(np.uint8).tobytes())
    assert digest.hexdigest() == metas[0]["sha256"]
    files = p.stdlib_files()
    assert not any({"test", "tests", "site-packages"} & set(f.parts[-3:]) for f in files)


def test_a_byte_is_its_own_token():
    encoding, text = p.get_tokenizer("bytes"), "def naïve():\n\treturn '€'"
    ids = encoding.encode_ordinary(text)
    assert ids == list(text.encode()) == p.tokenize(text.encode(), "bytes").tolist()
    assert encoding.decode(ids) == text and encoding.n_vocab == 256


def test_a_text_file_is_split_and_described(tmp_path):
    text = tmp_path / "poem.txt"
    text.write_bytes(bytes(range(200)) * 10)
    out = subprocess.run(
        [sys.executable, ROOT / "data" / "prepare.py", "file", text, "--out", tmp_path / "poem"],
        capture_output=True,
        text=True,
    )
    assert out.returncode == 0 and "bytes 2000" in out.stdout and "sha256" in out.stdout
    corpus = p.Corpus(str(tmp_path / "poem"), "bytes", 16, say=lambda line: None)
    assert len(corpus.shards["train"][0]) == 1900 and len(corpus.shards["val"][0]) == 100


def tokens(n, start=0):
    return (np.arange(start, start + n) % 250).astype(np.uint16)


def directory(tmp_path, train, val=None, meta=True):
    for name, data in (("train.bin", train), ("val.bin", tokens(100) if val is None else val)):
        (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.tobytes())
    if meta:
        described = dict(name="x", tokenizer="bytes", vocab_size=256)
        (tmp_path / "meta.json").write_text(json.dumps(described))
    return tmp_path


def corpus(root, block_size=8):
    return p.Corpus(str(root), "bytes", block_size, say=lambda line: None)


def llmc(data, count=None, version=1):
    head = np.zeros(256, np.int32)
    head[:3] = 20240520, version, len(data) if count is None else count
    return head.tobytes() + data.tobytes()


def test_shards_with_llmcs_header_are_read_and_windows_cover_all_of_them(tmp_path):
    root = directory(tmp_path, llmc(tokens(50)))
    (root / "train_2.bin").write_bytes(tokens(50, 100).tobytes())
    c = corpus(root)
    rows = np.concatenate([c.batch("train", (0, i), 32) for i in range(20)])
    assert rows.shape == (640, 9) and (np.diff(rows) == 1).all()  # no window runs across two shards
    assert set(rows[:, 0]) == {*range(42), *range(100, 142)}
    assert np.array_equal(c.batch("train", (1, 2), 4), c.batch("train", (1, 2), 4))
    assert not np.array_equal(c.batch("train", (1, 2), 4), c.batch("train", (1, 3), 4))


def test_nanogpts_directories_without_meta_are_gpt2(tmp_path):
    assert corpus(directory(tmp_path, tokens(50), meta=False)).vocab_size == 50257


@pytest.mark.parametrize(
    "train, says",
    [(b"", "0 bytes"), (b"abc", "3 bytes"), (tokens(8), "8 tokens"), (tokens(9) + 300, "token 308")]
    + [(llmc(tokens(50))[:-2], "whole"), (llmc(tokens(50), version=2), "whole")]
    + [(llmc(tokens(50), count=10**6), "whole")],
)
def test_bad_token_files_are_refused_with_a_sentence(tmp_path, train, says):
    with pytest.raises(p.UserError, match=says):
        corpus(directory(tmp_path, train))


def test_bad_directories_are_refused_with_a_sentence(tmp_path):
    for spoil, says in (
        (lambda d: (d / "val.bin").unlink(), "no val.bin"),
        (lambda d: (d / "meta.json").write_text("{"), "meta.json"),
        (lambda d: (d / "meta.json").write_text("[]"), "meta.json"),
        (lambda d: (d / "meta.json").write_text("[" * 100000), "meta.json"),
        (lambda d: (d / "meta.json").write_text('{"tokenizer": "bytes"}'), "meta.json"),
        (lambda d: (d / "meta.json").write_text('{"tokenizer": {}, "vocab_size": 2}'), "meta.json"),
        (lambda d: (d / "meta.json").write_text('{"tokenizer": "bytes", "vocab_size": 9}'), "meta"),
        (lambda d: ((d / "train.bin").unlink(), (d / "train.bin").mkdir()), "cannot read"),
    ):
        root = Path(tempfile.mkdtemp(dir=tmp_path))
        spoil(directory(root, tokens(50)))
        with pytest.raises(p.UserError, match=says):
            corpus(root)
    for missing in ("no-such", str(tmp_path / "x")):
        with pytest.raises(p.UserError, match="no file or directory"):
            corpus(missing)


def test_a_directory_with_other_files_is_never_replaced(tmp_path):
    (tmp_path / "my.txt").write_text("precious " * 100)
    with pytest.raises(p.UserError, match="other files"):
        p.prepare("file", tmp_path / "my.txt", out=tmp_path)
    assert (tmp_path / "my.txt").exists()


def test_a_description_survives_odd_metadata(tmp_path):
    root = directory(tmp_path, tokens(50))
    odd = dict(name="\ud800", tokenizer="bytes", vocab_size=256, bytes="many", sha256=3)
    (root / "meta.json").write_text(json.dumps(odd))
    lines = []
    p.Corpus(str(root), "bytes", 8, say=lines.append)
    assert len(lines) == 1 and "tokenizer bytes" in lines[0] and "bytes many" in lines[0]


def test_a_download_is_checked_and_a_failed_one_leaves_nothing(tmp_path, monkeypatch):
    source = tmp_path / "source.txt"
    source.write_bytes(b"To be, or not to be. " * 100)
    right = hashlib.sha256(source.read_bytes()).hexdigest()
    monkeypatch.setattr(p, "SHAKESPEARE", (source.as_uri(), right))
    meta = p.prepare("shakespeare", out=tmp_path / "out" / "s")
    assert meta["bytes"] == 2100
    for url, digest, says in (
        (source.as_uri(), "0" * 64, "SHA-256"),
        ((tmp_path / "gone").as_uri(), right, "offline, use --data stdlib"),
    ):
        monkeypatch.setattr(p, "SHAKESPEARE", (url, digest))
        with pytest.raises(p.UserError, match=says):
            p.prepare("shakespeare", out=tmp_path / "out" / "t")
    assert [x.name for x in (tmp_path / "out").iterdir()] == ["s"]


def test_fineweb_shards_are_checked_against_the_pointer_of_git_lfs(tmp_path, monkeypatch):
    for kind in ("resolve", "raw"):
        (tmp_path / kind).mkdir()
    for name in ("edu_fineweb_val_000000.bin", "edu_fineweb_train_000001.bin"):
        shard = llmc(tokens(60))
        (tmp_path / "resolve" / name).write_bytes(shard)
        digest = hashlib.sha256(shard).hexdigest()
        pointer = (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(shard)}\n"
        )
        (tmp_path / "raw" / name).write_text(pointer)
    monkeypatch.setattr(p, "FINEWEB", (tmp_path / "resolve").as_uri() + "/")
    p.prepare("fineweb-edu", out=tmp_path / "fw")
    assert corpus(tmp_path / "fw").tokenizer == "gpt2"
    (tmp_path / "resolve" / name).write_bytes(b"cut short")
    with pytest.raises(p.UserError, match="SHA-256"):
        p.prepare("fineweb-edu", out=tmp_path / "fw2")


@pytest.mark.parametrize(
    "argv, says",
    [(["nothing"], "choose from"), (["file"], "which file"), (["file", "/no/such"], "cannot read")]
    + [(["stdlib", "--tokenizer", "bpe"], "bpe"), ([], "NAME"), (["stdlib", "--bad"], "--bad")],
)
def test_prepare_answers_a_mistake_with_one_sentence(argv, says, tmp_path):
    out = subprocess.run(
        [sys.executable, ROOT / "data" / "prepare.py", *argv], capture_output=True, text=True
    )
    assert out.returncode == 2 and out.stderr.count("\n") == 1 and says in out.stderr


def test_gpt2_tokens_offline_are_an_explained_error(monkeypatch):
    import tiktoken

    def offline(name):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(p.UserError, match="TIKTOKEN_CACHE_DIR; offline, use bytes"):
        p.get_tokenizer("gpt2")


def test_texts_of_one_name_do_not_take_each_others_place(tmp_path, monkeypatch):
    """Another run may be reading what the first was prepared to."""
    monkeypatch.setattr(p, "HERE", tmp_path)
    found = []
    for word in ("one ", "two ", "one "):
        (tmp_path / "input.txt").write_text(word * 1000)
        corpus = p.Corpus(str(tmp_path / "input.txt"), "bytes", 8, say=lambda line: None)
        found.append((corpus.root, (corpus.root / "train.bin").stat().st_ino))
        assert bytes(corpus.shards["train"][0][:4].astype(np.uint8)) == word.encode()
    assert found[0] == found[2] and found[0][0] != found[1][0]
    names = []
    for content in ("{}", "{ }"):  # another tokenizer of the same path makes other tokens
        (tmp_path / "tokenizer.json").write_text(content)
        names.append(p.text_name(tmp_path / "input.txt", str(tmp_path / "tokenizer.json")))
    assert names[0] != names[1]
