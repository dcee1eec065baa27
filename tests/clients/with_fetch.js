// Adds a plant with fetch: with_fetch.js URL TOKEN BODY. NODE_EXTRA_CA_CERTS names the CA. Prints what the client sees.

const { subscribe } = require("node:diagnostics_channel");

const [url, token, body] = process.argv.slice(2);
const PROTOCOLS = { "http/1.1": "HTTP/1.1", h2: "HTTP/2" };

// fetch does not say which protocol it uses.
let socket;
subscribe("undici:client:connected", (message) => (socket = message.socket));

async function main() {
  const headers = { Authorization: `Bearer ${token}`, "Content-Type": "application/json" };
  const response = await fetch(url, { method: "POST", headers, body });
  const seen = { status: response.status, body: await response.text(), http: PROTOCOLS[socket.alpnProtocol], tls: socket.getProtocol() };
  console.log(JSON.stringify(seen));
}

main().catch((error) => {
  console.error(error.cause ?? error);
  process.exit(1);
});
