#!/bin/sh
# Prepares a data directory from a base backup and archived WAL: docs/patroni.md.
#
#   restore.sh BACKUPS DATA_DIRECTORY [TIME]
#
# BACKUPS is the directory that base-backup.sh was given. DATA_DIRECTORY is created. When PostgreSQL is started on it, it recovers to
# TIME, or without TIME to the end of the archived WAL, and then accepts connections. BACKUPS is only read. TIME is anything that
# date --date accepts; give the time zone: '2026-11-17 18:51:08+00'.
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
fi

# The newest backup that ended before that second.
name=
for backup in "$backups"/base/????-??-??T??:??:??Z; do
  if [ -d "$backup" ] && expr "${backup##*/}" '<' "$before" >/dev/null; then
    name=${backup##*/}
  fi
done
[ -n "$name" ] || fail "there is no backup in $backups/base${target:+ from before $target}"

# The data directory has its name only when it is complete.
rm -rf "$2.unfinished"
cp -R --preserve=mode,timestamps "$backups/base/$name" "$2.unfinished"
cd "$2.unfinished"
# Patroni's settings of the member that the backup was made from: its addresses, its leader, its standbys. With them this server
# would follow the running cluster, or wait for its standbys.
rm -f standby.signal postgresql.auto.conf
# Recovery continues with the next directory if one does not have a file: no member has archived all of them. A file that cannot be
# read ends the recovery with an error (exit code 255) instead of being taken for the end of the WAL.
cat >postgresql.conf <<END
# Written by restore.sh for the recovery. Patroni replaces this file.
restore_command = 'for file in $backups/wal/*/%f; do if [ -e "\$file" ]; then cp "\$file" "%p" || exit 255; exit 0; fi; done; exit 1'
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
echo "$2: backup $name, to be recovered to ${target:-the end of the archived WAL}"
