"""Training, validation and test text from public-domain novels, for the runs of docs/results.md.

python studies/novels.py --out=stores/novels-text
    fetches the novels in studies/novels.json (75 MB) and writes train.jsonl.gz, valid.jsonl.gz and test.jsonl.gz
    with a line {"id": …, "author": …, "text": …} per novel, and record.json with their SHA-256
python studies/novels.py --out=stores/novels-text --mirror=URL
    fetches URL/<name of the file> instead
python studies/novels.py --out=stores/my-text --input=FOLDER
    splits the .txt files of a folder instead: by the SHA-256 of their names, 5 % of the files are test text and 5 % are
    validation text, at least one each. Novels of one author may fall into different splits.

The source is the corpus "100 English Novels" of the Computational Stylistics Group at a pinned commit. Downloaded files
stay in OUT/files, and the same command resumes. The files have no headers or licences of Project Gutenberg. The text of
a document is that of its file without the byte-order mark and with line feeds as line ends. Everything else stays:
hard-wrapped lines, a few page numbers and page breaks, and the quotation marks that stand for accents in some files.
Validation and test text consist of excerpts of 4,096 characters in a random order. Together, they are the whole novels.
The suites score the first `eval.loss_tokens` tokens of a text, which are then a sample of all its novels.

docs/reproducing.md ("How the novels were split") says which novels were left out and how the authors were split.
"""

import argparse
import concurrent.futures
import gzip
import hashlib
import http.client
import json
import random
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from difftx.errors import EXIT_PREEMPTED, RunError, UserError, run_command
from difftx.files import new_file, read_file, remove_temporaries, require_local_paths, require_writable
from difftx.json_files import read_json, schema_error, write_record
from difftx.progress import Work

LIST = Path(__file__).with_suffix(".json")
LIST_SHAPE = {"url": str, "files": [{"name": str, "author": str, "bytes": int, "sha256": str, "split": str}]}
SPLITS = ("train", "valid", "test")
EXCERPT = 4096  # Characters of a document of the validation and test text.
HELD_OUT = 0.05  # Share of the files of --input in the validation split, and in the test split.
JOBS = 8  # Downloads at a time.
PAUSES = (1.0, 4.0, 10.0)  # Seconds between attempts to download a file.
TIMEOUT_SECONDS = 60.0  # Longest wait for a connection, and for the next bytes.
FILE_SECONDS = 600.0  # Longest time for a file, with all attempts. The largest has 2.6 MB.
RETRIED_STATUS = (408, 429)  # HTTP status codes below 500 that are retried. All codes from 500 on are retried too.


class Novel(NamedTuple):
    """A file of the corpus, its author and its split."""

    file: Path
    author: str
    split: str


def fetch(listed: Path, mirror: str | None, folder: Path) -> list[Novel]:
    """Download the files of a list into `folder`, except those that are there, and return them.

    Raises:
        UserError: The list or the mirror is invalid.
        RunError: A file cannot be downloaded, or the server has another file under its name.
    """
    content = read_json(listed)
    if why := schema_error(content, LIST_SHAPE):
        raise UserError(f"--list={listed}: {why}")
    for entry in content["files"]:
        if entry["split"] not in SPLITS or Path(entry["name"]).name != entry["name"]:
            raise UserError(f"--list={listed}: {entry} needs a file name without folder, and a split of {SPLITS}")
    url = (mirror or content["url"]).rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--mirror={url}: write an address that starts with http:// or https://")
    folder.mkdir(parents=True, exist_ok=True)
    remove_temporaries(folder)
    missing = [entry for entry in content["files"] if not _has(folder / entry["name"], entry["sha256"])]
    size = sum(entry["bytes"] for entry in missing)
    print(f"novels: {len(content['files'])}, to fetch: {len(missing)} ({size / 1e6:.0f} MB) from {url}", flush=True)
    with Work() as work, work.task("bytes of novels", size) as advance:
        pool = concurrent.futures.ThreadPoolExecutor(JOBS)
        try:
            downloads = {pool.submit(_download, url, folder, entry): entry["bytes"] for entry in missing}
            for download in concurrent.futures.as_completed(downloads):
                download.result()
                advance(downloads[download])
        finally:  # After an error, only the downloads that have started are finished.
            pool.shutdown(cancel_futures=True)
    return [Novel(folder / entry["name"], entry["author"], entry["split"]) for entry in content["files"]]


def _has(path: Path, sha256: str) -> bool:
    content = read_file(path)
    return content is not None and _sha256(content) == sha256


def _download(folder_url: str, folder: Path, entry: Mapping[str, Any]) -> None:
    """Download a file, and write it only if its content has the SHA-256 of its entry in the list."""
    url, expected = f"{folder_url}/{entry['name']}", entry["sha256"]
    content = _get(url, entry["bytes"])
    if (found := _sha256(content)) != expected:
        raise RunError(f"{url}: SHA-256 {found}, but expected {expected}; name another server with --mirror=URL")
    with new_file(folder / entry["name"]) as file:
        file.write(content)


def _get(url: str, size: int) -> bytes:
    """Return the `size` bytes at an address. Try again after errors that may be temporary."""
    deadline = time.monotonic() + FILE_SECONDS
    for pause in (*PAUSES, None):
        attempt: concurrent.futures.Future[bytes] = concurrent.futures.Future()
        threading.Thread(target=_try, args=(attempt, url, size), daemon=True).start()
        try:
            # A slow server may hold up the thread for ever, in each header and each byte. It is then left behind.
            return attempt.result(max(0.0, deadline - time.monotonic()))
        except (OSError, http.client.HTTPException) as error:
            is_late = not attempt.done()
            is_permanent = is_late
            if isinstance(error, urllib.error.HTTPError):
                is_permanent = error.code < 500 and error.code not in RETRIED_STATUS
                error.close()
            if is_permanent or pause is None:
                why = f"not complete after {FILE_SECONDS:.0f} s" if is_late else str(error)
                why += "" if is_permanent else f", {len(PAUSES) + 1} attempts"
                raise RunError(
                    f"{url}: cannot be downloaded ({why}); run the same command again to resume, name another server "
                    "with --mirror=URL, or use your own texts with --input=FOLDER"
                ) from error
        time.sleep(pause)
    raise AssertionError("The last attempt returns or raises.")


def _try(attempt: concurrent.futures.Future[bytes], url: str, size: int) -> None:
    """Read the `size` bytes at an address, and set the result or the error of the attempt."""
    try:
        # The scheme is http or https, as `fetch` checks.
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:  # nosec B310
            announced = response.length or 0
            content = response.read(size + 1)
        if len(content) > size:
            raise RunError(f"{url}: more than the {size:,} bytes of the list; name another server with --mirror=URL")
        if len(content) < min(announced, size):
            raise http.client.IncompleteRead(content, announced - len(content))
        attempt.set_result(content)
    except Exception as error:  # The thread that waits for the attempt raises it.
        attempt.set_exception(error)


def split_folder(folder: Path) -> list[Novel]:
    """Return the .txt files of a folder, ordered by name. The split is by the SHA-256 of the names.

    Raise `UserError` if there are fewer than three files.
    """
    names = sorted(path.name for path in folder.glob("*.txt") if path.is_file())
    if len(names) < len(SPLITS):
        raise UserError(f"--input={folder}: {len(names)} .txt files; give at least {len(SPLITS)}, one for each split")
    held_out = max(1, round(HELD_OUT * len(names)))
    by_hash = sorted(names, key=lambda name: _sha256(name.encode()))
    split = dict.fromkeys(by_hash[:held_out], "test") | dict.fromkeys(by_hash[held_out : 2 * held_out], "valid")
    print(f"{folder}: {len(names)} .txt files, of which the SHA-256 of the names chooses {held_out} for each of:")
    for of_split in ("test", "valid"):
        print(f"  {of_split}: {', '.join(name for name in names if split.get(name) == of_split)}")
    return [Novel(folder / name, _author(name), split.get(name, "train")) for name in names]


def _author(name: str) -> str:
    return name.removesuffix(".txt").partition("_")[0]


def write_splits(novels: Sequence[Novel], out: Path) -> None:
    """Write the files of the three splits and record.json, whose bytes depend only on the novels."""
    record = {}
    for split in SPLITS:
        chosen = [novel for novel in novels if novel.split == split]
        lines, files, size = hashlib.sha256(), {}, 0
        # The header of the gzip file has neither a time nor a name.
        with new_file(out / f"{split}.jsonl.gz") as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as compressed:
            documents = []
            for novel in chosen:
                text = _text(novel.file)
                files[novel.file.name] = _sha256(text.encode())
                size += len(text.encode())
                documents += _documents(novel, text, None if split == "train" else EXCERPT)
            if split != "train":
                random.Random(0).shuffle(documents)  # nosec B311: not for cryptography.
            for document in documents:
                line = json.dumps(document).encode() + b"\n"
                compressed.write(line)
                lines.update(line)
        # Versions of zlib may compress differently, so the hash is that of the decompressed lines.
        record[split] = {"sha256_of_lines": lines.hexdigest(), "bytes_of_text": size, "sha256_of_texts": files}
        authors = len({novel.author for novel in chosen})
        print(f"{out}/{split}.jsonl.gz: novels: {len(chosen)}, authors: {authors}, bytes of text: {size:,}")
    write_record(out / "record.json", record)


def _documents(novel: Novel, text: str, characters: int | None) -> list[dict[str, str]]:
    """Return the text of a novel as documents of at most `characters` characters, or whole for None."""
    about = {"author": novel.author}
    if characters is None or len(text) <= characters:
        return [{"id": novel.file.stem, **about, "text": text}]
    return [
        {"id": f"{novel.file.stem}:{start}", **about, "text": text[start : start + characters]}
        for start in range(0, len(text), characters)
    ]


def _text(path: Path) -> str:
    """Return the text of a file without a byte-order mark, with line feeds as line ends."""
    try:
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; convert the file, or leave it out") from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def main(arguments: Sequence[str]) -> int:
    """Fetch the novels or read a folder, and write the splits. Return the exit code: 0, or 75 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    parser.add_argument("--list", default=LIST, type=Path, help="list of files (studies/novels.json)")
    parser.add_argument("--mirror", metavar="URL", help="address of a folder with the files, in place of the list's")
    parser.add_argument("--input", type=Path, metavar="FOLDER", help="folder of your own .txt files")
    args = parser.parse_args(arguments)
    require_local_paths(args)
    if args.input is not None and (args.mirror is not None or args.list != LIST):
        raise UserError(f"--input={args.input}: nothing is fetched, so leave out --mirror and --list")
    require_writable(args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        novels = fetch(args.list, args.mirror, args.out / "files") if args.input is None else split_folder(args.input)
        write_splits(novels, args.out)
    except KeyboardInterrupt:
        print("stopped; the same command resumes", file=sys.stderr)
        return EXIT_PREEMPTED
    return 0


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
