// An OpenID Connect provider for tests: node provider.js PORT CERTIFICATE KEY
//
// Prints its port, which may be given as 0, and has new keys after each start. A client gets its tokens with client credentials; its id says
// what is special about them.
import { generateKeyPairSync, randomBytes } from 'node:crypto';
import { readFileSync } from 'node:fs';
import https from 'node:https';
import Provider from 'oidc-provider';

const [port, certificate, privateKey] = process.argv.slice(2);
const server = https.createServer({ cert: readFileSync(certificate), key: readFileSync(privateKey) });
await new Promise((resolve) => server.listen(Number(port), '127.0.0.1', resolve));
const issuer = `https://127.0.0.1:${server.address().port}`;

const keys = [
  ['RS256', 'rsa', { modulusLength: 2048 }],
  ['PS256', 'rsa', { modulusLength: 2048 }],
  ['ES256', 'ec', { namedCurve: 'P-256' }],
  ['EdDSA', 'ed25519', {}],
  ['ES384', 'ec', { namedCurve: 'P-384' }],
].map(([alg, type, options]) => {
  const pair = generateKeyPairSync(type, options);
  const kid = `${alg}-${randomBytes(4).toString('hex')}`;
  return { ...pair.privateKey.export({ format: 'jwk' }), alg, kid, use: 'sig' };
});

const changes = (client) => {
  const now = Math.floor(Date.now() / 1000);
  switch (client) {
    case 'expired': return { exp: now - 60 };
    case 'early': return { nbf: now + 3600 };
    case 'other-issuer': return { iss: 'https://login.example' };
    case 'no-subject': return { sub: undefined };
    case 'list': return { scope: undefined, scp: ['plants:read', 'plants:write'] };
    case 'program': return { scope: undefined, roles: ['plants:write'] };
    default: return {};
  }
};

const provider = new Provider(issuer, {
  clients: ['alice', 'bob', 'expired', 'early', 'other-issuer', 'no-subject', 'list', 'program'].map((id) => ({
    client_id: id,
    client_secret: 'secret',
    token_endpoint_auth_method: 'client_secret_post',
    grant_types: ['client_credentials'],
    redirect_uris: [],
    response_types: [],
  })),
  scopes: ['plants:write', 'plants:read'],
  jwks: { keys },
  cookies: { keys: ['not used'] },
  features: {
    devInteractions: { enabled: false },
    clientCredentials: { enabled: true },
    resourceIndicators: {
      enabled: true,
      // The last part of a resource is the algorithm of its tokens, the rest is the audience.
      getResourceServerInfo: (ctx, resource) => ({
        scope: 'plants:write plants:read',
        audience: resource.slice(0, resource.lastIndexOf('/')),
        accessTokenFormat: 'jwt',
        accessTokenTTL: 3600,
        jwt: { sign: { alg: resource.slice(resource.lastIndexOf('/') + 1) } },
      }),
    },
  },
  formats: {
    customizers: {
      jwt: (ctx, token, parts) => Object.assign(parts.payload, changes(token.clientId)),
    },
  },
});

server.on('request', provider.callback());
console.log(server.address().port);
// Ends with the test, even if that is killed.
process.stdin.resume().on('end', () => process.exit());
