#!/bin/sh
# patronictl with the settings of this machine: docs/patroni.md. patroni.yml alone does not have the addresses of etcd. On Debian this
# file is /usr/local/sbin/ctl. It needs root, because the settings contain passwords.
set -eu
set -a
. "${ENV_FILE:-/etc/patroni_env.conf}"
set +a
exec /opt/patroni/bin/patronictl -c "${CONFIG_FILE:-/etc/patroni/config.yml}" "$@"
