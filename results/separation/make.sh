#!/usr/bin/env bash
# Measure the shipped weights for 1, 2 and 4 iterations and write the table: see README.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
for iterations in 1 2 4; do
    for split in choice test; do
        capsroute explain inverted_small_multimnist --iterations $iterations --separation 1000 \
            --split $split --out results/separation/inverted_small_multimnist_r${iterations}_$split.json
    done
done
python results/separation/table.py
