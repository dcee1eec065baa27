// POST /plants as most people would write it: Fastify, a schema, a prepared statement, SQLite in WAL mode.
'use strict'

const { createHash, timingSafeEqual } = require('node:crypto')
const Database = require('better-sqlite3')
const fastify = require('fastify')

const [port, file, synchronous, tokenDigest] = process.argv.slice(2)
const knownDigest = Buffer.from(tokenDigest, 'hex')

const database = new Database(file)
database.pragma('journal_mode = WAL')
database.pragma(`synchronous = ${synchronous}`)
database.exec('CREATE TABLE IF NOT EXISTS plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT) STRICT')
const insert = database.prepare('INSERT INTO plants (id, name, tag) VALUES (?, ?, ?)')

const plant = { name: { type: 'string' }, tag: { type: 'string' } }
const schema = {
  body: { type: 'object', required: ['id', 'name'], properties: { id: { type: 'integer' }, ...plant } },
  response: { 200: { type: 'object', properties: plant } }
}

const app = fastify()

app.addHook('onRequest', async (request, reply) => {
  const [scheme, token] = (request.headers.authorization ?? '').split(' ')
  const digest = createHash('sha256').update(token ?? '').digest()
  if (scheme !== 'Bearer' || !timingSafeEqual(digest, knownDigest)) {
    return reply.code(401).send({ error: 40101, message: 'Unknown token.' })
  }
})

app.post('/plants', { schema }, async (request, reply) => {
  const { id, name, tag } = request.body
  try {
    insert.run(id, name, tag ?? null)
  } catch (error) {
    if (error.code !== 'SQLITE_CONSTRAINT_PRIMARYKEY') throw error
    return reply.code(400).send({ error: 40009, message: 'The id is taken.' })
  }
  return { name, tag }
})

process.on('SIGTERM', async () => {
  await app.close()
  database.close()
})

app.listen({ host: '127.0.0.1', port: Number(port) })
