// PocketBase writes with synchronous = NORMAL, which a power cut can undo, and has no setting for it. All its writes go
// through one connection, so that one can be told.
onBootstrap((event) => {
  event.next()
  event.app.nonconcurrentDB().newQuery('PRAGMA synchronous = FULL').execute()
})
