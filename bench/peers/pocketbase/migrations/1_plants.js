// The collection, and a user who may add to it.
migrate((app) => {
  app.save(new Collection({
    type: 'base',
    name: 'plants',
    createRule: '@request.auth.id != ""',
    fields: [
      { type: 'text', name: 'id', primaryKey: true, system: true, required: true, min: 1, max: 19, pattern: '^[0-9]+$' },
      { type: 'text', name: 'name', required: true },
      { type: 'text', name: 'tag' }
    ]
  }))
  const user = new Record(app.findCollectionByNameOrId('users'))
  user.setEmail($os.getenv('BENCH_EMAIL'))
  user.setPassword($os.getenv('BENCH_PASSWORD'))
  app.save(user)
})
