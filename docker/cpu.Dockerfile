# syntax=docker/dockerfile:1
# SGLang with DSPARK for small models on a CPU. Build from the root of the repository:
#   docker build -f docker/cpu.Dockerfile -t sglang-dspark:cpu .

FROM python:3.11-slim-bookworm

# gcc: Triton and torch compile small C programs, also on a CPU.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/sglang-dspark
# The 11 GB of dependencies have a layer of their own, in the versions that the tests passed with.
COPY constraints.txt pyproject.toml ./
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > requirements.txt \
    && pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt

COPY . .
# hadolint ignore=DL4006
RUN pip install --no-cache-dir --no-deps . \
    && ! pip check | grep sglang-dspark \
    && sglang-dspark enable-cpu \
    && ln -s "$(python -I -c 'import pathlib, sglang_dspark; print(pathlib.Path(sglang_dspark.__file__).parent)')/drafters" /opt/drafters \
    && useradd --create-home --uid 10001 dspark \
    && install -d -o dspark -g dspark /home/dspark/.cache/huggingface /home/dspark/.cache/sglang-dspark

USER 10001
WORKDIR /home/dspark
ENV HF_HOME=/home/dspark/.cache/huggingface \
    TRITON_CACHE_DIR=/home/dspark/.cache/sglang-dspark/triton \
    TORCHINDUCTOR_CACHE_DIR=/home/dspark/.cache/sglang-dspark/inductor
VOLUME ["/home/dspark/.cache/huggingface", "/home/dspark/.cache/sglang-dspark"]

EXPOSE 30000
HEALTHCHECK --start-period=10m --interval=30s --timeout=35s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:30000/health', timeout=30)"]
ENTRYPOINT ["python", "-m", "sglang.launch_server", "--host", "0.0.0.0", "--port", "30000", \
    "--mem-fraction-static", "0.3", "--sleep-on-idle"]
