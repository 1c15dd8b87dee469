#!/usr/bin/env bash
# All checks that need a GPU, in under ten minutes: `bash tests/gpu/check.sh` from the top of the checkout.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
"$python" -c 'import torch; print("torch", torch.__version__, "GPUs:", torch.cuda.device_count())'
PYTHONPATH="$PWD" timeout 580 "$python" -m pytest tests/gpu -v -rs -p no:cacheprovider "$@"
