"""Bring a corpus in: text -> train.bin, val.bin (uint16 tokens, as nanoGPT writes them), meta.json.

    python data/prepare.py stdlib         the Python library on this machine: nothing is downloaded
    python data/prepare.py file PATH      your own text
    python data/prepare.py shakespeare    1 MB, downloaded
    python data/prepare.py fineweb-edu    200 MB a shard of 1e8 GPT-2 tokens, downloaded

train.py calls `prepare` by itself when its --data is not prepared yet, and reads with `Corpus`.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
NAMES = ("stdlib", "shakespeare", "fineweb-edu")
VOCABULARY = {"bytes": 256, "gpt2": 50257}
TOKENIZERS = tuple(VOCABULARY)
HEADER_MAGIC, HEADER_INTS = 20240520, 256  # of llm.c's token files

SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
FINEWEB = (
    "https://huggingface.co/datasets/karpathy/fineweb-edu-100B-gpt2-token-shards/resolve/main/"
)


class UserError(Exception):
    """A mistake that one sentence explains: printed without a traceback, exit code 2."""

    def __init__(self, sentence):
        super().__init__(" ".join(str(sentence).splitlines()))  # a name in it may hold a newline


class ByteTokenizer:
    """A byte is its own id; with the methods of a tiktoken Encoding that are used here."""

    n_vocab = 256

    def encode_ordinary(self, text):
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids):
        return bytes(ids).decode("utf-8", errors="replace")


def get_tokenizer(name):
    """ "bytes" (needs no package), a tokenizer.json, or "gpt2" (50257 ids, fetched once)."""
    if name == "bytes":
        return ByteTokenizer()
    if name.endswith(".json") and Path(name).is_file():
        return ForeignTokenizer(name)
    if name not in TOKENIZERS:
        names = ", ".join(TOKENIZERS)
        raise UserError(f"unknown tokenizer {name!r}; choose from {names}, or a tokenizer.json")
    try:
        import tiktoken

        return tiktoken.get_encoding(name)
    except ImportError:
        raise UserError(f"tokenizer {name!r}: pip install tiktoken, or use bytes") from None
    except Exception as error:  # tiktoken lets every kind of network error through
        raise UserError(
            f"cannot load tokenizer {name!r} ({type(error).__name__}): tiktoken fetches it once"
            " from openaipublic.blob.core.windows.net to TIKTOKEN_CACHE_DIR; offline, use bytes"
        ) from None


class ForeignTokenizer:
    """A Hugging Face tokenizer.json, with the methods of a tiktoken Encoding that are used here."""

    def __init__(self, path):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise UserError(f"to read {path}: pip install tokenizers") from None
        try:
            self.tokenizer = Tokenizer.from_file(path)
        except Exception as error:  # the library raises Exception itself
            raise UserError(f"{path} is no tokenizer.json: {error}") from None
        self.n_vocab = self.tokenizer.get_vocab_size()

    def encode_ordinary(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        return self.tokenizer.decode(ids)


def token_type(vocab_size):
    """What a .bin file holds: uint16, as nanoGPT writes it, unless the ids need more."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def tokenize(text, tokenizer):
    """bytes -> ids. A byte is its own id, so that tokenizer needs no call."""
    if tokenizer == "bytes":
        return np.frombuffer(text, np.uint8).astype(np.uint16)
    encoding = get_tokenizer(tokenizer)
    ids = encoding.encode_ordinary(text.decode("utf-8", errors="replace"))
    return np.array(ids, token_type(encoding.n_vocab))


def stdlib_files():
    """The .py files of this Python's library in a fixed order, without tests and packages."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = [p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts)]
    return sorted(files, key=lambda p: p.relative_to(root).as_posix())


def read_texts(name, path, scratch):
    """-> (train bytes, val bytes, files): every 20th file, or the last 5 %, is held out."""
    if name == "stdlib":
        texts = [p.read_bytes() for p in stdlib_files()]
        if len(texts) < 20:
            raise UserError(
                "this Python has no library sources; use --data with a text file instead"
            )
        held = [t for i, t in enumerate(texts) if i % 20 == 10]
        return b"".join(t for i, t in enumerate(texts) if i % 20 != 10), b"".join(held), len(texts)
    if name == "shakespeare":
        path = scratch / "input.txt"
        download(*SHAKESPEARE, to=path)
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    cut = len(text) * 95 // 100
    return text[:cut], text[cut:], 1


def download(url, sha256, to):
    """Fetch url into the file `to` and check its SHA-256."""
    digest = hashlib.sha256()
    try:
        with urllib.request.urlopen(url, timeout=30) as response, open(to, "wb") as f:
            while chunk := response.read(1 << 20):
                digest.update(chunk)
                f.write(chunk)
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise UserError(f"cannot download {url} ({reason}); offline, use --data stdlib") from None
    if digest.hexdigest() != sha256:
        raise UserError(f"{url} has SHA-256 {digest.hexdigest()}, not {sha256}: nothing was kept")


def download_shard(name, to):
    """One shard of FineWeb-Edu; its SHA-256 stands in the pointer that git-lfs keeps for it."""
    url = FINEWEB + name
    try:
        with urllib.request.urlopen(url.replace("/resolve/", "/raw/"), timeout=30) as response:
            fields = dict(line.split(" ", 1) for line in response.read(1000).decode().splitlines())
        sha256 = fields["oid"].removeprefix("sha256:")
    except (OSError, KeyError, ValueError) as error:
        why = getattr(error, "reason", error)
        raise UserError(f"no checksum for {url} ({why}); offline, use --data stdlib") from None
    download(url, sha256, to)


def prepare(name, path=None, tokenizer="bytes", out=None, shards=1):
    """Write a corpus into the directory `out` (data/NAME), whole or not at all -> its meta."""
    if name == "file":
        if path is None:
            raise UserError("which file? python data/prepare.py file PATH")
        out = Path(out or HERE / (Path(path).stem + "-text"))
    elif name not in NAMES:
        raise UserError(f"unknown corpus {name!r}; choose from {', '.join(NAMES)}, file PATH")
    out = Path(out or HERE / name)
    try:
        if out.is_dir() and not {p.suffix for p in out.iterdir()} <= {".bin", ".json"}:
            why = "holds other files than a prepared corpus: choose another directory"
            raise UserError(f"{out} {why}")
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise UserError(f"cannot write to {out.parent}: {error.strerror}") from None
    try:
        meta = dict(name=name, python=platform.python_version())
        if name == "fineweb-edu":
            meta |= dict(tokenizer="gpt2", vocab_size=50257)
            download_shard("edu_fineweb_val_000000.bin", scratch / "val.bin")
            for i in range(1, shards + 1):
                shard = f"edu_fineweb_train_{i:06d}.bin"
                download_shard(shard, scratch / shard.removeprefix("edu_fineweb_"))
        else:
            train, val, files = read_texts(name, path, scratch)
            digest = hashlib.sha256(train + val).hexdigest()
            if len(train) == 0 or len(val) == 0:
                raise UserError(
                    f"{path or name} is too short to be split into training and validation"
                )
            meta |= dict(files=files, bytes=len(train) + len(val), sha256=digest)
            meta |= dict(tokenizer=tokenizer, vocab_size=get_tokenizer(tokenizer).n_vocab)
            tokenize(train, tokenizer).tofile(scratch / "train.bin")
            tokenize(val, tokenizer).tofile(scratch / "val.bin")
        (scratch / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        os.chmod(scratch, 0o755)
        if out.exists():
            shutil.rmtree(out)
        scratch.rename(out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return meta


class Tokens:
    """The ids of a .bin file, which is read anew for each slice: where somebody else shortens it
    meanwhile, that ends in a sentence. (A memory map would end the process.)"""

    def __init__(self, path, dtype, offset, size):
        self.path, self.dtype, self.offset = path, np.dtype(dtype), offset
        self.size = (size - offset) // self.dtype.itemsize

    def __len__(self):
        return self.size

    def __getitem__(self, window):
        start, stop, _ = window.indices(self.size)
        offset, n = self.offset + start * self.dtype.itemsize, max(0, stop - start)
        try:
            ids = np.fromfile(self.path, self.dtype, n, offset=offset)
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}") from None
        if len(ids) < n:
            raise UserError(f"{self.path} became shorter while it was read: prepare it again")
        return ids

    def __array__(self, dtype=None, copy=None):
        return self[:].astype(dtype or self.dtype, copy=False)

    def max(self, chunk=1 << 24):
        return max(int(self[i : i + chunk].max()) for i in range(0, self.size, chunk))


def read_tokens(path, dtype=np.uint16):
    """The Tokens of a .bin file, as nanoGPT writes it or with llm.c's header."""
    try:
        if not path.is_file():  # opening a pipe would wait for its other end
            raise UserError(f"cannot read {path}: it is no file")
        size = path.stat().st_size
        with open(path, "rb") as f:
            magic, version, count = np.frombuffer(f.read(12).ljust(12, b"\0"), np.int32).tolist()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if magic == HEADER_MAGIC:  # of 256 int32, the third counts the tokens
        if version != 1 or count < 1 or size != 4 * HEADER_INTS + 2 * count:
            raise UserError(f"{path} is not the whole of a version 1 token file: fetch it again")
        return Tokens(path, np.uint16, 4 * HEADER_INTS, size)
    if size == 0 or size % np.dtype(dtype).itemsize:
        kind = np.dtype(dtype).name
        raise UserError(f"{path} has {size} bytes, which are not {kind} tokens: prepare it again")
    return Tokens(path, dtype, 0, size)


def read_meta(root):
    path = root / "meta.json"
    try:
        if not path.exists():
            return None
        meta = json.loads(path.read_text()) if path.is_file() else None
        tokenizer, size = meta["tokenizer"], meta["vocab_size"]
        typed = isinstance(tokenizer, str) and type(size) is int  # not 256.0 or true
        if typed and VOCABULARY.get(tokenizer, size) == size and 0 < size < 1 << 31:
            return meta
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        pass
    raise UserError(f"{path} is not what data/prepare.py writes: prepare the corpus again")


def text_name(path, tokenizer):
    """For a text of the user's: by content, since a run may be reading what another one needs."""
    try:
        own = tokenizer.endswith(".json") and Path(tokenizer).is_file()
        kind = Path(tokenizer).read_bytes() if own else tokenizer.encode()
        digest = hashlib.sha256(kind + path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    return f"{path.stem}-{digest[:12]}-text"


class Corpus:
    """The shards of a corpus, prepared first if it must be. `source` is a name, a text file or a
    directory. Batch k is the same whatever was read before it: there is no position to restore."""

    def __init__(self, source, tokenizer, block_size, say=print):
        self.block_size, self.root = block_size, Path(source)
        try:
            is_file, is_directory = self.root.is_file(), self.root.is_dir()
        except OSError as error:
            raise UserError(f"cannot read {source}: {error.strerror}") from None
        if source in NAMES or is_file:
            name = source if source in NAMES else "file"
            tokenizer = "gpt2" if source == "fineweb-edu" else tokenizer
            out = HERE / (source if source in NAMES else text_name(self.root, tokenizer))
            meta = read_meta(out) if out.exists() else None
            fresh = meta is not None and meta["tokenizer"] == tokenizer
            if not fresh or source == "stdlib" and meta.get("python") != platform.python_version():
                prepare(name, source, tokenizer, out)
            self.root = out
        elif not is_directory:
            names = ", ".join(NAMES)
            raise UserError(f"data {source!r} is no file or directory, and not one of {names}")
        guess = dict(name=self.root.name, tokenizer="gpt2", vocab_size=50257)  # nanoGPT's
        self.meta = read_meta(self.root) or guess
        self.tokenizer, self.vocab_size = self.meta["tokenizer"], self.meta["vocab_size"]
        self.shards = {split: self.open(split) for split in ("train", "val")}
        say("data     " + describe(self.meta))

    def open(self, split):
        paths = sorted(p for p in self.root.glob("*.bin") if split in p.name)
        if not paths:
            raise UserError(f"{self.root} has no {split}.bin: prepare it with data/prepare.py")
        shards = [read_tokens(p, token_type(self.vocab_size)) for p in paths]
        for path, tokens in zip(paths, shards):
            if len(tokens) <= self.block_size:
                raise UserError(
                    f"{path} has {len(tokens)} tokens, and block_size {self.block_size} needs more:"
                    " use a longer text or a smaller --block-size"
                )
            if (top := tokens.max()) >= self.vocab_size:
                raise UserError(
                    f"{path} holds token {top}, but tokenizer {self.tokenizer} ends at"
                    f" {self.vocab_size - 1}: does meta.json belong to it?"
                )
        return shards

    def batch(self, split, key, size):
        """Random windows (size, block_size + 1), int64; `key`, a tuple of integers, picks them."""
        rng = np.random.default_rng([("train", "val").index(split), *key])
        shards = self.shards[split]
        ends = np.cumsum([len(s) - self.block_size for s in shards])
        rows = []
        for start in rng.integers(0, ends[-1], size):
            i = int(np.searchsorted(ends, start, side="right"))
            start -= ends[i - 1] if i else 0
            rows.append(shards[i][start : start + self.block_size + 1].astype(np.int64))
        rows = np.stack(rows)
        if (top := rows.max()) >= self.vocab_size:  # all were below when the file was opened
            raise UserError(f"{self.root} changed while it was read: it holds token {top} now")
        return rows


def describe(meta):
    """One line: files, bytes, SHA-256, Python version, tokenizer."""
    known = [
        f"{k} {str(meta[k])[:16]}" for k in ("files", "bytes", "sha256", "python") if k in meta
    ]
    line = ", ".join([str(meta.get("name", "tokens")), f"tokenizer {meta['tokenizer']}", *known])
    return " ".join(line.encode("ascii", "replace").decode().splitlines())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "name", metavar="NAME", help="stdlib, shakespeare, fineweb-edu, or file PATH"
    )
    parser.add_argument("path", nargs="?", help="the text file, after `file`")
    parser.add_argument("--tokenizer", default="bytes", help="bytes, gpt2, or a tokenizer.json")
    parser.add_argument("--shards", type=int, default=1, help="of fineweb-edu, 1e8 tokens each")
    parser.add_argument("--out", help="directory (default: data/NAME)")
    parser.error = lambda message: sys.exit(print(f"prepare.py: {message}", file=sys.stderr) or 2)
    args = parser.parse_args()
    try:
        print(describe(prepare(args.name, args.path, args.tokenizer, args.out, args.shards)))
    except (UserError, OSError, MemoryError) as error:
        sys.exit(print(f"prepare.py: {error or 'out of memory'}", file=sys.stderr) or 2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
