"""Fetches published ONNX models from their packages on PyPI: fetch_published.py TABLE FOLDER.

TABLE has the columns id, package (name==version), file (inside the package), sha256. FOLDER gets one ID.onnx each. Models that are
there already stay; a model that cannot be fetched is reported and left out. Exits with 1 only if a file is not what the table says.
"""

import csv
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile


def digest(data):
    return hashlib.sha256(data).hexdigest()


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
                data = wheel.read(row["file"])
                if digest(data) != row["sha256"]:
                    sys.exit(f"{package}: {row['file']} is not the file that the table names")
                target = os.path.join(folder, row["id"] + ".onnx")
                with open(target + ".part", "wb") as out:
                    out.write(data)
                os.replace(target + ".part", target)


def main():
    table, folder = sys.argv[1:]
    os.makedirs(folder, exist_ok=True)
    missing = {}
    with open(table, newline="") as file:
        for row in csv.DictReader(file):
            path = os.path.join(folder, row["id"] + ".onnx")
            if not os.path.exists(path) or digest(open(path, "rb").read()) != row["sha256"]:
                missing.setdefault(row["package"], []).append(row)
    for package, rows in missing.items():
        try:
            fetch(rows, package, folder)
        except (subprocess.CalledProcessError, KeyError, OSError) as error:
            print(f"cannot fetch {', '.join(row['id'] for row in rows)} from {package}: {error}", file=sys.stderr)


main()
