# syntax=docker/dockerfile:1
# SGLang with DSPARK for NVIDIA GPUs. Build from the root of the repository:
#   docker build -f docker/cuda.Dockerfile -t sglang-dspark:cuda .

# SGLang's own image: it compiles some of its kernels at run time, with the CUDA toolkit that this image was tested with.
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23
FROM ${SGLANG_IMAGE}

WORKDIR /opt/sglang-dspark
COPY . .
# Without dependencies: the image has them, and pip shall not exchange what SGLang was tested with. `pip check` names
# sglang-dspark, and so ends the build, where the base is outside the range that pyproject.toml allows.
# hadolint ignore=DL4006
RUN pip install --no-cache-dir --no-deps . \
    && ! pip check | grep sglang-dspark \
    && ln -s "$(python3 -I -c 'import pathlib, sglang_dspark; print(pathlib.Path(sglang_dspark.__file__).parent)')/drafters" /opt/drafters \
    && useradd --create-home --uid 10001 dspark \
    && install -d -o dspark -g dspark /home/dspark/.cache/huggingface /home/dspark/.cache/sglang-dspark

USER 10001
WORKDIR /home/dspark
# What is compiled at the first start is kept with the step times.
ENV HF_HOME=/home/dspark/.cache/huggingface \
    TRITON_CACHE_DIR=/home/dspark/.cache/sglang-dspark/triton \
    TORCHINDUCTOR_CACHE_DIR=/home/dspark/.cache/sglang-dspark/inductor
VOLUME ["/home/dspark/.cache/huggingface", "/home/dspark/.cache/sglang-dspark"]

EXPOSE 30000
# Healthy once a warm-up request was answered; before, models are loaded, kernels compiled and step times measured.
HEALTHCHECK --start-period=20m --interval=30s --timeout=35s --retries=3 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:30000/health', timeout=30)"]
ENTRYPOINT ["python3", "-m", "sglang.launch_server", "--host", "0.0.0.0", "--port", "30000"]
