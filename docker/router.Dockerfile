# syntax=docker/dockerfile:1
# SGLang's router, which spreads requests over replicas. Build: docker build -f docker/router.Dockerfile -t sglang-router .

FROM python:3.11-slim-bookworm

RUN pip install --no-cache-dir sglang-router==0.3.2 && useradd --create-home --uid 10001 router
USER 10001
EXPOSE 30000 29000
HEALTHCHECK --start-period=2m --interval=15s --timeout=10s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:30000/health', timeout=8)"]
ENTRYPOINT ["python", "-m", "sglang_router.launch_router", "--host", "0.0.0.0", "--port", "30000", \
    "--prometheus-host", "0.0.0.0", "--prometheus-port", "29000"]
