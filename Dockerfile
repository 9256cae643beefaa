# An image with lightning_d9m, whose build trains on the digits twice and fails unless both runs agree.
#
#   docker build -t lightning-d9m .
#   docker run --rm -v "$PWD:/work" lightning-d9m d9m repeat -n 2 -- python train.py
FROM python:3.11-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/*
# A mounted project belongs to a user of the host, and git would refuse to read its commit.
RUN git config --system --add safe.directory "*"
WORKDIR /src
COPY . .
# --build-arg PIP_EXTRA_INDEX_URL=... can name an index of CPU builds of torch, which are much smaller.
ARG PIP_EXTRA_INDEX_URL
RUN pip install --no-cache-dir "torch==2.13.0" && pip install --no-cache-dir ".[examples]"
RUN d9m repeat -n 2 -o /tmp/digits -- python examples/digits.py && rm -rf /tmp/digits
WORKDIR /work
CMD ["d9m", "--help"]
