#!/bin/sh
# Makes a base backup of the cluster for point-in-time recovery: docs/patroni.md. Run it once a day, on the machine that has the
# backups:
#
#   base-backup.sh DIRECTORY
#
# DIRECTORY/base gets one directory for each backup, named after its time in UTC. DIRECTORY/wal has one directory with archived
# WAL for each member of the cluster. The KEEP (14) newest backups are kept, with the WAL that any of them needs. Both belong to one
# cluster: a cluster that was created anew gets a DIRECTORY of its own, because its WAL has the same names.
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
# A host that accepts connections and does not respond is passed over. Otherwise the script would wait for it, and keep its lock.
export PGCONNECT_TIMEOUT="${PGCONNECT_TIMEOUT:-10}"
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
# pg_basebackup would report WAL as flushed, and a leader without a standby would count it as one. A host that stops responding
# meanwhile must not keep the lock until the next night.
timeout --foreground 20h pg_basebackup --pgdata=unfinished --checkpoint=fast --wal-method=stream --no-slot --no-password ||
  fail "pg_basebackup failed"
# The time of its end: it cannot be restored to an earlier one.
name=$(date -u +%Y-%m-%dT%H:%M:%SZ)
[ ! -e "$name" ] || fail "$1/base/$name exists"
pg_verifybackup --quiet unfinished || fail "the backup is damaged"
mv unfinished "$name"
sync -f .
echo "$name"

# A backup that is being deleted has no name of a backup either.
kept=$(ls -d ????-??-??T??:??:??Z | sort | tail -n "$keep")
for backup in ????-??-??T??:??:??Z; do
  if ! echo "$kept" | grep -qx "$backup"; then
    mv "$backup" unfinished
    rm -rf unfinished
  fi
done

# The first segment that a kept backup needs: the one with the lowest position, not the one of the oldest backup. After the cluster was
# restored to an earlier time, newer backups begin at lower positions, on another timeline. WAL of all timelines before that position
# is deleted; timeline histories are kept.
segments=
for backup in $kept; do
  segment=$(sed -n 's/^START WAL LOCATION: .* (file \([0-9A-F]*\))$/\1/p' "$backup/backup_label")
  [ ${#segment} -eq 24 ] || fail "$1/base/$backup/backup_label has no segment; no WAL was deleted"
  # The first eight characters are the timeline.
  segments="$segments$segment
"
done
first=$(printf %s "$segments" | sort -k 1.9 | head -n 1)
for archive in ../wal/*/; do
  if [ -d "$archive" ]; then
    pg_archivecleanup "$archive" "$first"
  fi
done
