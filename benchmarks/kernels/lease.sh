#!/bin/bash
# Everything that eight minutes on a card are for: is it right, how fast is it, what is faster.
#   bash benchmarks/kernels/lease.sh OUT_FOLDER [SOURCE_OF_AN_OLDER_VERSION]
# Each step has its own time limit, so that a slow one costs itself and not the next.
out=${1:?a folder for results}
[ -n "$CAPSROUTE_COMMIT" ] || git rev-parse --verify -q HEAD > /dev/null || {
    echo "lease.sh: results must name a commit: run it in a checkout, or set CAPSROUTE_COMMIT" >&2
    exit 1
}
old=$2
run="python3 -W ignore benchmarks/kernels/run.py"
layers=("cifar10 conv1" "cifar10 conv2" "cifar10 class" "cifar100 conv1" "cifar100 conv2" \
    "cifar100 800-20" "cifar100 20-100" "matrix conv" "matrix class" "wide conv" "wide class" \
    "vector conv" "vector class")
swept=("cifar10 conv1" "cifar100 conv1" "matrix conv" "cifar10 class" "vector conv" "vector class")
cases=$(python3 -c 'import sys; sys.path[:0] = ["tests/ops", "src"]; import triton_cases
print(len(triton_cases.ODD))')

echo "== right? ($cases odd shapes, three dtypes, five seeds)"
for case in $(seq 0 $((cases - 1))); do
    timeout 150 $run --check "$case" --json "$out/check.$case.jsonl" &
done
wait
cat "$out"/check.*.jsonl >"$out/check.jsonl" && rm "$out"/check.*.jsonl
grep '"good": false' "$out/check.jsonl" | cut -c1-400
echo "$(grep -c '"good": true' "$out/check.jsonl") good, $(grep -c '"good": false' "$out/check.jsonl") not"

echo "== compile for the rest"
for layer in "${layers[@]}"; do
    timeout 120 $run --warm --layers "$layer" &
    [ -n "$old" ] && KERNELS_SOURCE=$old timeout 120 $run --warm --layers "$layer" &
done
wait
for layer in "${swept[@]}"; do
    for part in 0 1 2 3; do timeout 120 $run --warm --sweep "$layer" --part "$part" 4 & done
done
wait

echo "== how fast"
timeout 60 $run --layers all --json "$out/layers.jsonl"
if [ -n "$old" ]; then
    echo "-- before"
    KERNELS_SOURCE=$old timeout 60 $run --layers all --json "$out/layers.jsonl"
fi
timeout 110 $run --sweep "${swept[@]}" --json "$out/sweep.jsonl"
python3 benchmarks/kernels/table.py "$out/layers.jsonl"
python3 benchmarks/kernels/best.py "$out/sweep.jsonl"

echo "== the tests on a card"
PYTHONPATH=src:tests/ops timeout 120 python3 -m pytest -q -m gpu -W ignore -p no:cacheprovider \
    tests/ops/test_inverted_triton_gpu.py -k "deterministic or captures or one_graph or memory or some_children" 2>&1 | tail -3
