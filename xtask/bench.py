"""Measures meganeura on exported workloads and writes the raw figures: what `cargo xtask bench` runs, and what a machine without cargo runs itself.

usage: python xtask/bench.py --meganeura PROGRAM --exports DIR --machine NAME --commit HASH [--only NAME,...] [--scripts DIR] [--pytorch ROWS.jsonl] [-o OUT.json]

DIR/<workload>/ holds full.onnx, full.npz, minimal.onnx, minimal.npz, expect.npz, grads.safetensors and loss.txt. What is missing is exported by
export_onnx.py of --scripts, whose gate.py also judges every mode, and whose torch_baseline.py runs where PyTorch has CUDA. --pytorch takes its rows
from an earlier run instead. Every cell of a file is of one commit: --only replaces cells of a file of the same commit, and of no other.
Exits 1 if a workload is past the bounds of gate.py; its cells are kept, and say so.
"""
import argparse
import datetime
import json
import pathlib
import re
import subprocess
import sys
import tempfile

WORKLOADS = ["smollm2-135m", "smolvla", "unet", "resnet50", "whisper-tiny"]
MODES = ["strict", "accelerated"]
# Phase of a cell: model, and the phase that `meganeura bench` measures. Inputs and outputs stay on the device.
PHASES = {"latency": ("minimal", "inference"), "inference": ("full", "inference"), "training": ("full", "training"), "step": ("full", "step")}
# What no program of this arithmetic can beat, forward pass in ms: the larger of FLOPs at 51 TFLOP/s, which cuBLAS reaches in f32 on an H200, and of
# weight bytes at 4.3 TB/s. Training takes three times that.
FLOOR_MS = {"smollm2-135m": (0.70, 2.09), "smolvla": (0.19, 0.58), "unet": (0.06, 0.17), "resnet50": (0.64, 1.92), "whisper-tiny": (0.72, 2.17)}
FLOORS = {"NVIDIA H200": FLOOR_MS}
FORWARD = re.compile(r"forward relative L2 (\S+)")
GRADIENTS = re.compile(r"worst (\S+) \(.*?\); worst cosine (\S+)")
RUNS = {"warm_up": 5, "runs": 20}


def main():
    arguments = parse()
    only = arguments.only.split(",")
    unknown = [name for name in only if name not in WORKLOADS]
    if unknown:
        sys.exit(f"no workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    previous = earlier(arguments)
    export(arguments, only)
    modes = offered(arguments.meganeura)
    pytorch = pytorch_best(arguments, only, modes)
    cells, gates, device = [], [], {}
    for mode in modes:
        for name in only:
            gates.append(gate(arguments, name, mode))
            for model in dict.fromkeys(model for model, _ in PHASES.values()):
                measured, device = measure(arguments, name, mode, model)
                for cell in measured:
                    cell["pytorch_ms"] = pytorch.get((name, mode, cell["phase"]))
                    cells.append(cell)
                    print(f"{name} {mode} {cell['phase']}: {cell['median_ms']:.3f} ms", flush=True)
            write(arguments, previous, only, cells, gates, device, pytorch)
    print(f"wrote {arguments.output}")
    failed = [f"{row['workload']} {row['mode']}" for row in gates if row["passed"] is False]
    if failed:
        sys.exit(f"past the bounds: {', '.join(failed)}")


def write(arguments, previous, only, cells, gates, device, pytorch):
    """Writes what was measured so far, so that a run that is cut short leaves it, beside what the file has of other workloads."""
    kept = lambda key: [row for row in previous.get(key, []) if row["workload"] not in only]
    order = lambda row: (WORKLOADS.index(row["workload"]), MODES.index(row["mode"]))
    data = {
        "commit": arguments.commit,
        "date": datetime.date.today().isoformat(),
        "device": device["device"],
        "driver": f"{device['driver']} {device['driver_info']}".strip(),
        "method": f"median of {RUNS['runs']} after {RUNS['warm_up']} warm-ups and half a second; host time from submission to completion, inputs and outputs on the device",
        "pytorch": pytorch.get("version") or previous.get("pytorch"),
        "floors_ms": {name: {"inference": i, "training": t} for name, (i, t) in FLOORS.get(device["device"], {}).items()},
        "gates": sorted(kept("gates") + gates, key=order),
        "cells": sorted(kept("cells") + cells, key=order),
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(data, indent=1) + "\n")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--meganeura", type=pathlib.Path, required=True)
    parser.add_argument("--exports", type=pathlib.Path, required=True)
    parser.add_argument("--machine", required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--only", default=",".join(WORKLOADS))
    parser.add_argument("--scripts", type=pathlib.Path)
    parser.add_argument("--pytorch", type=pathlib.Path)
    parser.add_argument("-o", "--output", type=pathlib.Path)
    arguments = parser.parse_args()
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", arguments.machine):
        parser.error("--machine takes small letters, digits and hyphens: it names a file")
    arguments.output = arguments.output or pathlib.Path("docs/bench") / f"{arguments.machine}.json"
    return arguments


def earlier(arguments):
    """The file that cells are replaced in; empty where all are measured."""
    if arguments.only == ",".join(WORKLOADS) or not arguments.output.exists():
        return {}
    previous = json.loads(arguments.output.read_text())
    if previous["commit"] != arguments.commit:
        sys.exit(f"{arguments.output} is of commit {previous['commit']}: measure all workloads, or write another file with -o")
    return previous


def export(arguments, only):
    missing = [name for name in only if not (arguments.exports / name / "full.onnx").exists()]
    if missing and not arguments.scripts:
        sys.exit(f"{arguments.exports} lacks {', '.join(missing)}; --scripts names the folder of export_onnx.py")
    if missing:
        subprocess.run([sys.executable, arguments.scripts / "export_onnx.py", arguments.exports, "--only", ",".join(missing)], check=True)


def offered(meganeura):
    """The modes that this program has."""
    text = subprocess.run([meganeura, "bench", "--help"], check=True, capture_output=True, text=True).stdout
    return [mode for mode in MODES if re.search(rf"^\s*- {mode}\b", text, re.M)]


def call(arguments, command, folder, model, mode, *more):
    """What a command prints. Plans are compiled anew."""
    words = [arguments.meganeura, command, folder / f"{model}.onnx", "--data", folder / f"{model}.npz", "--precision", mode, "--plan-cache", "off", *more]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


def measure(arguments, name, mode, model):
    """The cells that a model gives, without PyTorch's times, and the device."""
    folder = arguments.exports / name
    cells = {measured: phase for phase, (file, measured) in PHASES.items() if file == model}
    loss = ["--loss", loss_of(folder)] if set(cells) != {"inference"} else []
    runs = ["--runs", str(RUNS["runs"]), "--warm-up", str(RUNS["warm_up"])]
    phases = [word for measured in cells for word in ("--phase", measured)]
    bench = json.loads(call(arguments, "bench", folder, model, mode, *phases, *loss, *runs, "--json"))
    for row in bench["phases"]:
        row.pop("kernels")
        row.pop("plan", None)
    return [{"workload": name, "mode": mode, **row, "phase": cells[row["phase"]]} for row in bench["phases"]], bench


def loss_of(folder):
    return (folder / "loss.txt").read_text().strip()


def gate(arguments, name, mode):
    """What gate.py says of the outputs and the gradients; `passed` is None where nobody judges."""
    row = {"workload": name, "mode": mode, "passed": None, "forward_l2": None, "worst_gradient_norm": None, "worst_gradient_cosine": None}
    if not arguments.scripts:
        return row
    folder = arguments.exports / name
    with tempfile.TemporaryDirectory() as scratch:
        outputs, gradients = pathlib.Path(scratch) / "outputs.npz", pathlib.Path(scratch) / "gradients.safetensors"
        call(arguments, "run", folder, "full", mode, "-o", outputs)
        call(arguments, "grad", folder, "full", mode, "--loss", loss_of(folder), "-o", gradients)
        words = ["--outputs", outputs, folder / "expect.npz", "--gradients", gradients, folder / "grads.safetensors"]
        judged = subprocess.run([sys.executable, arguments.scripts / "gate.py", *words], capture_output=True, text=True)
    print(f"{name} {mode}: {judged.stdout.strip()}", flush=True)
    forward, worst = FORWARD.search(judged.stdout), GRADIENTS.search(judged.stdout)
    if not (forward and worst):
        sys.exit(f"gate.py did not judge {name}:\n{judged.stdout}{judged.stderr}")
    numbers = {"forward_l2": float(forward[1]), "worst_gradient_norm": float(worst[1]), "worst_gradient_cosine": float(worst[2])}
    return row | numbers | {"passed": judged.returncode == 0}


def pytorch_best(arguments, only, modes):
    """PyTorch's best time of each cell over its variants, and its version."""
    if arguments.pytorch:
        text, version = arguments.pytorch.read_text(), f"rows of {arguments.pytorch.name}, from an earlier run"
    elif arguments.scripts and (torch := cuda()):
        words = [sys.executable, arguments.scripts / "torch_baseline.py", "--modes", ",".join(modes), "--only", ",".join(only)]
        text, version = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout, f"{torch}, on the same machine"
    else:
        return {}
    best = {"version": version}
    for row in (json.loads(line) for line in text.splitlines() if line.startswith("{")):
        for phase in PHASES:
            if row.get(phase) is not None:
                key = row["workload"], row["mode"], phase
                best[key] = min(best.get(key, row[phase]), row[phase])
    return best


def cuda():
    """PyTorch's version, if it has CUDA here."""
    try:
        import torch
    except ImportError:
        return None
    return torch.__version__ if torch.cuda.is_available() else None


if __name__ == "__main__":
    main()
