# A server for one model:
#   docker build -t clearhead .
#   docker run -p 8000:8000 -v ./runs/x:/model:ro -e CLEARHEAD_API_KEYS=secret clearhead
# With a GPU: docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 -t clearhead .
FROM python:3.13-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /source
COPY . .
# First the wheel with compiled kernels, then an environment with it and the packages of a server.
RUN python -m venv /build \
 && /build/bin/pip install -c constraints.txt --extra-index-url "$TORCH_INDEX" -e ".[release]" \
 && /build/bin/python release/build.py --draft --out /dist \
 && python -m venv /opt/clearhead \
 && /opt/clearhead/bin/pip install -c constraints.txt --extra-index-url "$TORCH_INDEX" \
    "$(ls /dist/*.whl)[serve,constrain,audio,pictures]"

FROM python:3.13-slim
RUN useradd --create-home --uid 10001 clearhead
COPY --from=build /opt/clearhead /opt/clearhead
# By number: a host that asks whether this is root need not know the name.
USER 10001
ENV PATH=/opt/clearhead/bin:$PATH PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/healthz', timeout=5)"]
# A container's loopback can not be reached from outside, so the server binds to all addresses, and wants keys.
ENTRYPOINT ["clearhead", "serve"]
CMD ["/model", "--host", "0.0.0.0", "--port", "8000"]
