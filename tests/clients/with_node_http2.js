// Adds a plant with Node's HTTP/2 client: with_node_http2.js URL TOKEN BODY. NODE_EXTRA_CA_CERTS names the CA. Prints what the client sees.

const http2 = require("node:http2");

const [url, token, body] = process.argv.slice(2);

const fail = (error) => {
  console.error(error);
  process.exit(1);
};

const session = http2.connect(url).on("error", fail);
const headers = { ":method": "POST", ":path": new URL(url).pathname, authorization: `Bearer ${token}`, "content-type": "application/json" };
const request = session.request(headers).setEncoding("utf8").on("error", fail);
const seen = { body: "", http: "HTTP/2" };
request.on("response", (response) => (seen.status = response[":status"]));
request.on("data", (text) => (seen.body += text));
request.on("end", () => {
  seen.tls = session.socket.getProtocol();
  console.log(JSON.stringify(seen));
  session.close();
});
request.end(body);
