# docker build -t effloop . && docker run --gpus all --ipc=host effloop
FROM nvidia/cuda:12.8.1-runtime-ubuntu24.04
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git python3 python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /effloop
COPY . .
RUN pip install --no-cache-dir -e '.[test]'
# The same two commands as in the README: effloop, python -m pytest.
CMD ["effloop"]
