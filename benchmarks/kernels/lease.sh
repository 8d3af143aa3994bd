#!/bin/bash
# Everything a short lease of a card is for: compile in parallel first, then time alone, then check.
# bash benchmarks/kernels/lease.sh OUT_FOLDER
out=${1:-/tmp}
run="python3 -W ignore benchmarks/kernels/run.py"
time (
    for layer in "cifar10 conv1" "cifar10 conv2" "cifar10 class" "cifar100 conv1" "cifar100 conv2" \
        "cifar100 800-20" "cifar100 20-100" "matrix conv" "matrix class" "wide class" "vector conv" \
        "vector class"; do $run --layers "$layer" >/dev/null & done
    for part in 0 1 2 3 4 5; do $run --sweep "cifar10 conv1" --part "$part" 6 & done
    wait
)
time $run --layers all --csv "$out/layers.csv" --sweep "cifar10 conv1" 2>&1 | tee "$out/log"
time (
    for case in $(seq 0 11); do $run --check "$case" & done
    wait
)
