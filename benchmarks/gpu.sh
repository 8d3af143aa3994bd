#!/bin/bash
# All rows of benchmarks/gpu.csv and benchmarks/memory.csv, and the generator's speed, on one GPU.
#
#     bash benchmarks/gpu.sh [FOLDER]     (default: benchmarks)
#
# Rows that are there already, of this commit and machine, are not measured again, so a run that
# was cut goes on. Every command is followed by the next one even if it fails; it says so.
# Run it where `python3 -m capsroute` works; where git does not, set CAPSROUTE_COMMIT to the commit.
out=${1:-benchmarks}
[ -n "$CAPSROUTE_COMMIT" ] || git rev-parse --verify -q HEAD > /dev/null || {
    echo "gpu.sh: rows must name a commit: run it in a checkout, or set CAPSROUTE_COMMIT" >&2
    exit 1
}
bench() { python3 -m capsroute bench "$@" --out "$out/gpu.csv" || echo "FAILED: bench $*"; }
resnet=inverted_resnet_cifar10

bench $resnet:1,2,3,4,5,10 --modes train
bench $resnet:2 --modes infer --batch 1 128 2048
bench inverted_resnet_cifar100:2,4 --modes train
bench inverted_simple_cifar10:4 --modes train
bench inverted_vector_multimnist:2 cnn_multimnist_learned_pool --modes train
bench dynamic_vector_multimnist inverted_matrix_multimnist_wide --modes train
bench inverted_matrix_multimnist cnn_multimnist --modes train
python3 benchmarks/generator.py cuda > "$out/generator_gpu.json" || echo "FAILED: generator"
python3 benchmarks/memory.py > "$out/memory.csv" || echo "FAILED: memory"
bench $resnet:2,4 --modes train --reference --repeats 20
bench $resnet:1,3,4,5 --modes infer
bench $resnet:1,3,5 --modes train --reference --repeats 20
bench em_simple_cifar10 dynamic_simple_cifar10 cnn_cifar10 resnet18_cifar10 --modes train
bench inverted_simple_cifar10:1,2,3,5 em_resnet_cifar10 dynamic_resnet_cifar10 --modes train
bench inverted_resnet_cifar100 inverted_simple_cifar10 em_simple_cifar10 dynamic_simple_cifar10 \
    cnn_cifar10 resnet18_cifar10 inverted_vector_multimnist inverted_matrix_multimnist \
    inverted_matrix_multimnist_wide dynamic_vector_multimnist cnn_multimnist --modes infer
bench $resnet:2 --backbone timm/resnet50 --image-size 224
