# labkit on CPUs, with JupyterLab on copies of the chapters in the folder that is mounted at /work:
#
#     docker build -t labkit .
#     docker run --rm -it -p 8888:8888 --user "$(id -u):$(id -g)" -v "$PWD:/work" labkit
#     docker run --rm labkit labkit groups --world-size 16 --tp 4 --pp 2
FROM python:3.11-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

COPY constraints.txt /src/
RUN pip install --no-cache-dir -c /src/constraints.txt --no-deps --index-url "$TORCH_INDEX" torch
COPY . /src
RUN pip install --no-cache-dir -c /src/constraints.txt /src

# A user of another number has no entry in the image's list of users.
ENV HOME=/work USER=labkit
WORKDIR /work
EXPOSE 8888
CMD ["labkit", "lab", "--ip", "0.0.0.0", "--browser", "false"]
