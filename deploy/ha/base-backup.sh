#!/bin/sh
# Makes a base backup of the cluster for point-in-time recovery: docs/patroni.md. Run it once a day, on the machine that has the
# backups:
#
#   base-backup.sh DIRECTORY
#
# DIRECTORY/base gets one directory for each backup, named after its time in UTC. DIRECTORY/wal has one directory with archived
# WAL for each member of the cluster. The KEEP (14) newest backups are kept, with the WAL that is needed since the oldest of them.
#
# The connection is set by variables: PGHOST with all machines, PGUSER=replicator, and PGPASSFILE. The name of the backup is
# printed when it is complete and verified. Nothing is deleted unless there is a new backup. The exit code is 0 if all went well.
set -eu
umask 077
export LC_ALL=C
# pg_verifybackup reads WAL only of its own version. Debian does not have it in the usual path.
PATH="${PG_BIN_DIR:-/usr/lib/postgresql/15/bin}:$PATH"
# A backup does not slow the leader down if there is a standby.
export PGTARGETSESSIONATTRS="${PGTARGETSESSIONATTRS:-prefer-standby}"
keep="${KEEP:-14}"

fail() {
  echo "base-backup.sh: $1" >&2
  exit 1
}

[ $# -eq 1 ] || fail "usage: base-backup.sh DIRECTORY"
case "$keep" in
  '' | 0* | *[!0-9]*) fail "KEEP is not a number of backups: $keep" ;;
esac
[ -d "$1/wal" ] || fail "$1/wal does not exist: the archived WAL belongs there, one directory for each member"
mkdir -p "$1/base"
cd "$1/base"
exec 9>lock
flock --nonblock 9 || fail "another backup is running in $1"

# A backup has its name only when it is complete. The leftover of a killed script is deleted.
rm -rf unfinished
trap 'rm -rf unfinished' EXIT
# The WAL that was written during the backup is a part of it, so it can be restored without the archive too. With a slot,
# pg_basebackup would report WAL as flushed, and a leader without a standby would count it as one.
pg_basebackup --pgdata=unfinished --checkpoint=fast --wal-method=stream --no-slot --no-password || fail "pg_basebackup failed"
# The time of its end: it cannot be restored to an earlier one.
name=$(date -u +%Y-%m-%dT%H:%M:%SZ)
[ ! -e "$name" ] || fail "$1/base/$name exists"
pg_verifybackup --quiet unfinished || fail "the backup is damaged"
mv unfinished "$name"
sync -f .
echo "$name"

# A backup that is being deleted has no name of a backup either.
kept=$(ls -d ????-??-??T??:??:??Z | sort | tail -n "$keep")
oldest=$(echo "$kept" | head -n 1)
for backup in ????-??-??T??:??:??Z; do
  if ! echo "$kept" | grep -qx "$backup"; then
    mv "$backup" unfinished
    rm -rf unfinished
  fi
done

# The first segment that the oldest backup needs. WAL of all timelines before it is deleted; timeline histories are kept.
segment=$(sed -n 's/^START WAL LOCATION: .* (file \([0-9A-F]*\))$/\1/p' "$oldest/backup_label")
[ ${#segment} -eq 24 ] || fail "$1/base/$oldest/backup_label has no segment"
for archive in ../wal/*/; do
  if [ -d "$archive" ]; then
    pg_archivecleanup "$archive" "$segment"
  fi
done
