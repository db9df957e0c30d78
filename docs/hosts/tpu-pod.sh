#!/bin/bash
# A slice of Cloud TPU with several hosts, such as a v5litepod-16 of four: one process on each, started at once.
# Needs a folder that all hosts mount (Filestore over NFS) with this repository, its .venv and the run's output.
set -euo pipefail

NAME=${NAME:?the name of the TPU}
ZONE=${ZONE:?its zone}
SHARED=${SHARED:-/mnt/shared}

gcloud compute tpus tpu-vm ssh "$NAME" --zone="$ZONE" --worker=all --command="
  cd $SHARED/posttrain
  .venv/bin/posttrain run configs/sft_gsm8k.yaml output=$SHARED/runs/sft_gsm8k
"
