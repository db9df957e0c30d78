#!/bin/bash
# XPK writes the JobSet itself. More slices than one also need mesh.slices in the configuration. STORAGE: a Filestore that `xpk storage create` mounted at /shared.
set -euo pipefail

xpk workload create \
  --workload=posttrain \
  --cluster="${CLUSTER:?the cluster}" \
  --project="${PROJECT:?the project}" \
  --zone="${ZONE:?the zone}" \
  --tpu-type=v5litepod-16 \
  --num-slices=1 \
  --docker-image="${IMAGE:?an image with posttrain}" \
  --storage="${STORAGE:?a storage}" \
  --command="posttrain run configs/sft_gsm8k.yaml output=/shared/runs/sft_gsm8k"
