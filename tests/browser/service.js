// A plantstore on a free port with a temporary store.

import { execFileSync, spawn } from "node:child_process";
import { createHash, X509Certificate } from "node:crypto";
import { once } from "node:events";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";

const STOP_TIMEOUT_MS = 20_000;

// A certificate in a directory of its own, and the hash of its public key, by which Chromium accepts it without a CA.
export function createCertificate() {
  const directory = mkdtempSync(join(tmpdir(), "plantstore-browser-"));
  const [cert, key] = [join(directory, "cert.pem"), join(directory, "key.pem")];
  const names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"];
  const kind = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"];
  execFileSync("openssl", [...kind, ...names, "-keyout", key, "-out", cert], { stdio: "pipe" });
  const publicKey = new X509Certificate(readFileSync(cert)).publicKey.export({ type: "spki", format: "der" });
  const keyHash = createHash("sha256").update(publicKey).digest("base64");
  return { cert, key, keyHash, remove: () => rmSync(directory, { recursive: true }) };
}

// With a certificate, over TLS.
export async function startService(certificate) {
  const directory = mkdtempSync(join(tmpdir(), "plantstore-browser-"));
  const others = Object.entries(process.env).filter(([name]) => !name.startsWith("PLANTSTORE_"));
  const env = { ...Object.fromEntries(others), PLANTSTORE_LISTEN: "127.0.0.1:0", PLANTSTORE_OPS_LISTEN: "127.0.0.1:0" };
  const options = { cwd: directory, env, stdio: ["ignore", "ignore", "pipe"] };
  const tls = certificate ? ["--tls-cert", certificate.cert, "--tls-key", certificate.key] : [];
  const child = spawn(process.env.BINARY_UNDER_TEST, ["serve", ...tls], options);
  const ended = once(child, "exit");
  const log = [];
  const { address, ops_address } = await new Promise((resolve, reject) => {
    const lines = createInterface({ input: child.stderr });
    lines.on("line", (line) => {
      log.push(line);
      const listening = line.startsWith("{") && JSON.parse(line).message === "listening";
      if (listening) resolve(JSON.parse(line));
    });
    lines.on("close", () => reject(new Error(`it does not listen:\n${log.join("\n")}`)));
    child.on("error", reject);
  });
  return {
    origin: `${certificate ? "https" : "http"}://${address}`,
    opsOrigin: `http://${ops_address}`,
    database: join(directory, "plantstore.db"),
    signal: (name) => child.kill(name),
    token: readFileSync(join(directory, "plantstore.token"), "utf8").trim(),
    log,
    // The stored plants, read with another process.
    query: (sql) => execFileSync("sqlite3", [join(directory, "plantstore.db"), sql], { encoding: "utf8" }).trim(),
    async stop() {
      child.kill("SIGTERM");
      const late = setTimeout(() => child.kill("SIGKILL"), STOP_TIMEOUT_MS);
      const [code] = await ended;
      clearTimeout(late);
      rmSync(directory, { recursive: true });
      if (code !== 0) throw new Error(`the service ended with ${code}:\n${log.join("\n")}`);
    },
  };
}
