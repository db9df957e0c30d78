# posttrain for a TPU or a GPU, from the package registry alone. EXTRA says for which: tpu, cuda (CUDA 13) or cuda12.
#   docker build --build-arg EXTRA=tpu -t posttrain .
#   as="--init --rm --user $(id -u):$(id -g) -v $PWD:/work"
#   docker run $as --privileged --net=host posttrain run configs/quickstart.yaml    # TPU
#   docker run $as --gpus=all --shm-size=16g posttrain run configs/quickstart.yaml  # GPU
# It does not run as root: without --user as user 1000, who must be able to write the folder that is mounted.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
COPY . /src
RUN pip wheel --no-cache-dir --no-deps -w /dist /src

FROM python:${PYTHON}-slim
ARG EXTRA
RUN test -n "$EXTRA" || { echo "give --build-arg EXTRA=tpu, cuda or cuda12" >&2; exit 1; }
COPY --from=build /dist /dist
COPY constraints.txt /dist/
RUN pip install --no-cache-dir -c /dist/constraints.txt "$(echo /dist/*.whl)[$EXTRA,agents,mcp,rewards,view]" \
    && posttrain --version
# Drivers come from the host: the container runtime of NVIDIA reads these.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Runs, data and the caches of compiled programs and models outlive the container there.
ENV XDG_CACHE_HOME=/work/.cache HF_HOME=/work/.cache/huggingface
# Any user has these: one that --user names has no home and no name of its own.
ENV HOME=/work USER=posttrain
RUN useradd --uid 1000 --home-dir /work --shell /usr/sbin/nologin posttrain \
    && install --directory --mode 1777 --owner posttrain /work
USER 1000
WORKDIR /work
ENTRYPOINT ["posttrain"]
CMD ["--help"]
