# docker build -t effloop . && docker run --gpus all --ipc=host effloop
# torch's wheels bring CUDA; the host needs NVIDIA's driver and its container toolkit.
FROM python:3.12-slim
RUN apt-get update && apt-get install --yes --no-install-recommends git && rm -rf /var/lib/apt/lists/*
WORKDIR /effloop
COPY . .
RUN pip install --no-cache-dir -e '.[test]'
# The same two commands as in the README: effloop, python -m pytest.
CMD ["effloop"]
