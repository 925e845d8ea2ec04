# Stand-ins for the official images, which need a registry: the same programs from Debian, under the official names.
FROM debian:bookworm-minbase AS debian
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive
# As in Debian's image: without it downloaded packages stay in a layer.
RUN printf '%s\n' 'DPkg::Post-Invoke {"rm -f /var/cache/apt/archives/*.deb";};' 'Dir::Cache::pkgcache ""; Dir::Cache::srcpkgcache "";' >/etc/apt/apt.conf.d/docker-clean

# libpython: the python backend's stub is linked to it. EXTERNALLY-MANAGED: pip may install into the system's Python.
FROM debian AS python
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends python3-minimal libpython3-stdlib libpython3.11 python3-pip ca-certificates \
    && rm -rf /var/lib/apt/lists/* /usr/lib/python3.11/EXTERNALLY-MANAGED

FROM debian AS envoy
COPY envoy /usr/local/bin/envoy

FROM debian AS redis
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends redis-server \
    && rm -rf /var/lib/apt/lists/*
VOLUME /data
WORKDIR /data

FROM debian AS prometheus
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends prometheus \
    && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner nobody /prometheus
USER nobody
WORKDIR /prometheus
VOLUME /prometheus
ENTRYPOINT ["prometheus"]

FROM debian AS alertmanager
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends prometheus-alertmanager \
    && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner nobody /alertmanager
USER nobody
VOLUME /alertmanager
ENTRYPOINT ["prometheus-alertmanager"]
