#!/bin/sh
# Prepares a data directory from a base backup and archived WAL: docs/patroni.md.
#
#   restore.sh BACKUPS DATA_DIRECTORY [TIME]
#
# BACKUPS is the directory that base-backup.sh was given. DATA_DIRECTORY is created. When PostgreSQL is started on it, it recovers to
# TIME, or without TIME to the end of the archived WAL, and then accepts connections. BACKUPS is only read. TIME is anything that
# date --date accepts; give the time zone: '2026-11-17 18:51:08+00'.
#
# Without TIME, the last archived file is printed. PostgreSQL logs "restored log file" with that name; otherwise WAL before it is
# missing, and the recovery has ended there.
set -eu
umask 077
export LC_ALL=C

fail() {
  echo "restore.sh: $1" >&2
  exit 1
}

[ $# -eq 2 ] || [ $# -eq 3 ] || fail "usage: restore.sh BACKUPS DATA_DIRECTORY [TIME]"
backups=$(cd "$1" && pwd)
[ ! -e "$2" ] || fail "$2 exists"
case "$backups" in
  *[!A-Za-z0-9/._-]*) fail "the path of the backups has a character other than letters, digits and /._-: $backups" ;;
esac
target=
before=9999
if [ $# -eq 3 ]; then
  target=$(date -u --date="$3" '+%Y-%m-%d %H:%M:%S.%6N+00') || fail "not a time: $3"
  before=$(date -u --date="$3" +%Y-%m-%dT%H:%M:%SZ)
  # The end of the WAL comes before it, so the recovery would fail.
  expr "$before" '<=' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" >/dev/null || fail "$3 is in the future"
fi

# The newest backup that ended before that second.
name=
for backup in "$backups"/base/????-??-??T??:??:??Z; do
  if [ -d "$backup" ] && expr "${backup##*/}" '<' "$before" >/dev/null; then
    name=${backup##*/}
  fi
done
[ -n "$name" ] || fail "there is no backup in $backups/base${target:+ from before $target}"

files=$(ls "$backups"/wal/*/) || fail "$backups/wal cannot be read (to restore a backup without archived WAL, create an empty directory there)"
# The last segment of the newest timeline, or its history if it has no segment yet.
newest=$(echo "$files" | grep -Ex '[0-9A-F]{8}(\.history|[0-9A-F]{16})' | cut -c 1-8 | sort | tail -n 1)
last=$(echo "$files" | grep -Ex "$newest(\.history|[0-9A-F]{16})" | sort | tail -n 1)

# The data directory has its name only when it is complete.
rm -rf "$2.unfinished"
cp -R --preserve=mode,timestamps "$backups/base/$name" "$2.unfinished"
cd "$2.unfinished"
# Patroni's settings of the member that the backup was made from: its addresses, its leader, its standbys. With them this server
# would follow the running cluster, or wait for its standbys. PostgreSQL complains if postgresql.auto.conf is missing.
rm -f standby.signal
: >postgresql.auto.conf
# The addresses that may connect to the cluster, or TLS that this server does not have, may exclude the machine that it runs on.
printf 'host all all %s scram-sha-256\n' 127.0.0.0/8 ::1/128 >pg_hba.conf
# Recovery continues with the next directory if one does not have a file: no member has archived all of them. A directory or a file that
# cannot be read ends the recovery with an error (exit code 255) instead of being taken for the end of the WAL.
#
# Of the last segment of a timeline there can be two files. A member that was promoted archives FILE.partial, which ends where its own
# timeline begins. FILE can be that of the old leader, with what it wrote after that and never acknowledged. So the first is preferred.
cat >postgresql.conf <<END
# Written by restore.sh for the recovery. Patroni replaces this file and pg_hba.conf.
restore_command = 'ls $backups/wal/*/ >/dev/null || exit 255; for file in $backups/wal/*/%f.partial $backups/wal/*/%f; do if [ -e "\$file" ]; then cp "\$file" "%p" || exit 255; exit 0; fi; done; exit 1'
recovery_target_action = promote
# No connections until the recovery has ended.
hot_standby = off
archive_mode = off
unix_socket_directories = ''
END
[ -z "$target" ] || echo "recovery_target_time = '$target'" >>postgresql.conf
touch recovery.signal
cd - >/dev/null
mv "$2.unfinished" "$2"
echo "$2: backup $name, to be recovered to ${target:-the end of the archived WAL${last:+, $last}}"
