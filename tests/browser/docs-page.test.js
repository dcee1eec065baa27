// Tests of the docs page in a browser.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, test as fact } from "node:test";
import { promisify } from "node:util";

import { add, contrast, launch, overflow, posts, read, violations } from "./reader.js";
import { createCertificate, startService } from "./service.js";

const LARGEST = "9223372036854775807";
const CONTRAST_MIN = 4.5;
const WIDE = { width: 1360, height: 900 };
const NARROW = { width: 360, height: 740 };

let certificate;
let service;
let tlsService;
let browser;

before(async () => {
  certificate = createCertificate();
  service = await startService();
  tlsService = await startService(certificate);
  browser = await launch(certificate.keyHash);
});

after(async () => {
  await browser?.close();
  await service?.stop();
  await tlsService?.stop();
  certificate?.remove();
});

// A test with its own page, which must log no errors and request no other host.
function test(name, { overTls = false, ...options }, steps) {
  fact(name, { timeout: 60_000 }, async () => {
    const used = overTls ? tlsService : service;
    const reader = await read(browser, used, options);
    try {
      await steps(reader);
      assert.deepEqual(reader.errors, []);
      for (const request of reader.asked) assert.equal(new URL(request.url()).origin, used.origin);
    } finally {
      await reader.close();
    }
  });
}

const screenshot = (page, name, options) =>
  page.screenshot({ path: join(process.env.SCREENSHOTS, `${name}.png`), ...options });

test("the root redirects to the page, which loads only its own files", { path: "/" }, async ({ page, asked }) => {
  assert.equal(page.url(), `${service.origin}/docs`);
  assert.match(await page.title(), /Plant Store/);
  const paths = asked.map((request) => new URL(request.url()).pathname);
  const files = ["/", "/docs", "/docs/icon.svg", "/docs/page.css", "/docs/page.js"];
  // A headless browser may not request the icon.
  assert.deepEqual([...new Set([...paths, "/docs/icon.svg"])].sort(), files);
});

test("over TLS everything is loaded and added with HTTP/2", { overTls: true }, async ({ page }) => {
  await page.getByLabel("Token").fill(tlsService.token);
  await page.getByLabel("id", { exact: true }).fill("12");
  await page.getByLabel("name", { exact: true }).fill("Welwitschia");
  const response = await add(page);
  // HTTP/2 has no reason phrases.
  assert.match(await response.innerText(), /^200\s+{"name":"Welwitschia","tag":"indoor"}/);
  assert.equal(tlsService.query("select name, tag from plants where id = 12"), "Welwitschia|indoor");
  assert.match(await page.locator("#curl").innerText(), /https:\/\/127\.0\.0\.1:/);

  const protocols = await page.evaluate(() => {
    const entries = [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")];
    return Object.fromEntries(entries.map((entry) => [new URL(entry.name).pathname, entry.nextHopProtocol]));
  });
  for (const path of ["/docs", "/docs/page.css", "/docs/page.js", "/plants"]) assert.equal(protocols[path], "h2", path);
  await screenshot(page, "over-tls");
});

fact("without the hash of its key the certificate is not accepted", { timeout: 60_000 }, async () => {
  const other = await launch("");
  try {
    await assert.rejects(read(other, tlsService), /ERR_CERT_AUTHORITY_INVALID/);
  } finally {
    await other.close();
  }
});

test("the largest id is sent exactly, and a different plant with it is a conflict", {}, async ({ page, asked }) => {
  await page.getByLabel("Token").fill(service.token);
  await page.getByLabel("id", { exact: true }).fill(LARGEST);
  await page.getByLabel("name", { exact: true }).fill("Welwitschia");
  await page.getByLabel("tag", { exact: true }).fill("desert");
  const response = await add(page);
  assert.match(await response.innerText(), /200 OK\s+{"name":"Welwitschia","tag":"desert"}\s+request id\s+[0-9a-f]{16}\s+took\s+[\d.]+ ms/);
  assert.equal(posts(asked)[0].postData(), `{"id":${LARGEST},"name":"Welwitschia","tag":"desert"}`);
  assert.equal(service.query(`select name, tag from plants where id = ${LARGEST}`), "Welwitschia|desert");
  await page.setViewportSize({ width: 1360, height: 1080 });
  await page.evaluate(() => scrollTo(0, 0));
  await screenshot(page, "added");

  await page.getByLabel("name", { exact: true }).fill("Fern");
  await add(page);
  assert.match(await response.innerText(), /400 Bad Request\s+error 40009\s+The id belongs to a different plant/);
  assert.equal(service.query(`select name from plants where id = ${LARGEST}`), "Welwitschia");
});

test("input is sent unchanged", {}, async ({ page, asked }) => {
  await page.getByLabel("Token").fill(service.token);
  const sent = async () => {
    await add(page);
    return posts(asked).at(-1).postData();
  };
  await page.getByLabel("id", { exact: true }).fill("-9223372036854775808.0");
  await page.getByLabel("name", { exact: true }).fill('"\\ \u0000 é 🌿');
  await page.getByLabel("tag", { exact: true }).fill("");
  assert.equal(await sent(), '{"id":-9223372036854775808.0,"name":"\\"\\\\ \\u0000 é 🌿","tag":""}');
  await page.getByLabel("send a tag").uncheck();
  await page.getByLabel("id", { exact: true }).fill("");
  assert.equal(await sent(), '{"name":"\\"\\\\ \\u0000 é 🌿"}');
  await page.getByLabel("id", { exact: true }).fill("twelve");
  assert.match(await sent(), /^{"id":twelve,/);

  await page.getByLabel("JSON").check();
  const raw = page.getByLabel("Request body, sent unchanged");
  assert.match(await raw.inputValue(), /^{"id":twelve,/);
  await raw.fill('  {"id": 12345678901234567890123, "name": }\n');
  assert.equal(await sent(), '  {"id": 12345678901234567890123, "name": }\n');
  assert.match(await page.getByRole("status").innerText(), /error 40001/);
  await raw.fill('{"id":10000000000000001e0,"name":"x"}');
  await sent();
  assert.equal(service.query("select name from plants where id = 10000000000000001"), "x");
});

test("a 400 is shown with number and message, in view and with sufficient contrast", {}, async ({ page }) => {
  for (const viewport of [WIDE, NARROW]) {
    await page.setViewportSize(viewport);
    await page.getByLabel("Token").fill(service.token);
    await page.getByLabel("id", { exact: true }).fill("1.5");
    const response = await add(page);
    const number = response.getByText("40002");
    const sentence = response.getByText("The body is not a plant: id: ");
    for (const text of [number, sentence]) {
      const box = await text.boundingBox();
      assert.ok(box.y >= 0 && box.y + box.height <= viewport.height, JSON.stringify(box));
      assert.ok(box.x >= 0 && box.x + box.width <= viewport.width, JSON.stringify(box));
      assert.ok((await contrast(text)) >= CONTRAST_MIN);
    }
    assert.ok(parseFloat(await sentence.evaluate((at) => getComputedStyle(at).fontSize)) >= 16);
    assert.equal(await overflow(page), 0);
    await screenshot(page, viewport === WIDE ? "rejected" : "rejected-narrow");
  }
  await page.getByRole("status").getByRole("link").click();
  const row = page.locator("#error-40002");
  assert.match(await row.innerText(), /not a NewPlant/);
  const { y } = await row.boundingBox();
  assert.ok(y >= 0 && y < NARROW.height, String(y));
});

test("an invalid or missing token is shown as 401", {}, async ({ page, asked }) => {
  const response = await add(page);
  assert.match(await response.innerText(), /401 Unauthorized\s+error 40100\s+A bearer token is required/);
  assert.equal(posts(asked)[0].headers().authorization, undefined);
  await page.getByLabel("Token").fill("plant_wrong");
  await add(page);
  assert.match(await response.innerText(), /401 Unauthorized\s+error 40101\s+The token is unknown/);
  await page.getByLabel("Token").fill("pflänzchen✿");
  await add(page);
  assert.match(await response.innerText(), /Not sent\s+The token has characters/);
  assert.equal(posts(asked).length, 2);
});

test("a token is sent in its header and nowhere else", {}, async ({ page, asked }) => {
  await page.getByLabel("Token").fill(` ${service.token} `);
  await page.getByLabel("id", { exact: true }).fill("77");
  await add(page);
  const [post] = posts(asked);
  assert.equal(post.headers().authorization, `Bearer ${service.token}`);
  for (const request of asked) assert.ok(!request.url().includes(service.token));
  assert.ok(!(post.postData() ?? "").includes(service.token));
  assert.ok(!(await page.locator("body").innerText()).includes(service.token));
  const kept = await page.evaluate(() => [localStorage.length, sessionStorage.length, document.cookie, location.href]);
  assert.deepEqual(kept, [0, 0, "", `${service.origin}/docs`]);
  await page.reload();
  assert.equal(await page.getByLabel("Token").inputValue(), "");
});

test("everything can be done by keyboard", {}, async ({ page }) => {
  const press = (key) => page.keyboard.press(key);
  const focused = () => page.evaluate(() => document.activeElement.id || document.activeElement.textContent);
  await press("Tab");
  assert.equal(await focused(), "Skip to the form");
  assert.ok((await page.getByText("Skip to the form").boundingBox()).y >= 0);
  await press("Enter");
  await press("Tab");
  assert.equal(await focused(), "token");
  await page.keyboard.type(service.token);
  const order = ["reveal", "as-fields", "id", "name", "tag", "has-tag", "send"];
  for (const id of order) {
    await press("Tab");
    assert.equal(await focused(), id);
    const ring = await page.evaluate(() => getComputedStyle(document.activeElement).outlineStyle);
    assert.equal(ring, "solid", id);
    if (id === "id") await page.keyboard.type("4711");
  }
  await press("Enter");
  await page.getByText("200 OK").waitFor();
  // The focus stays, and the rest of the page is still reachable.
  assert.equal(await focused(), "send");
  await press("Tab");
  assert.equal(await focused(), "copy");
  assert.equal(service.query("select name from plants where id = 4711"), "Monstera");

  // Enter in a field submits the form, too.
  await page.getByLabel("name", { exact: true }).focus();
  await page.keyboard.type("Fern");
  await press("Enter");
  await page.getByText("error 40009").waitFor();
  await page.getByLabel("fields", { exact: true }).focus();
  await press("ArrowRight");
  await page.getByLabel("Request body, sent unchanged").waitFor();
});

test("while a plant is being added it cannot be added again", {}, async ({ page, asked }) => {
  let release;
  const held = new Promise((resolve) => (release = resolve));
  await page.route("**/plants", async (route) => {
    await held;
    await route.continue();
  });
  await page.getByLabel("Token").fill(service.token);
  await page.getByLabel("id", { exact: true }).fill("88");
  await page.getByLabel("id", { exact: true }).press("Enter");
  const button = page.getByRole("button", { name: "Adding…" });
  await button.waitFor();
  assert.equal(await button.getAttribute("aria-disabled"), "true");
  await button.click({ force: true });
  await page.getByLabel("id", { exact: true }).press("Enter");
  release();
  await page.getByText("200 OK").waitFor();
  assert.equal(posts(asked).length, 1);
  assert.equal(await page.getByRole("button", { name: "Add plant" }).getAttribute("aria-disabled"), "false");
});

test("a missing response is reported", {}, async ({ page, errors }) => {
  await page.route("**/plants", (route) => route.abort("connectionreset"));
  const response = await add(page);
  assert.match(await response.innerText(), /No response\s+The service cannot be reached, .* adding it again is always safe/);
  assert.equal(errors.length, 1);
  assert.match(errors.pop(), /ERR_CONNECTION_RESET/);
});

test("the curl command does the same as the button", { permissions: ["clipboard-read", "clipboard-write"] }, async ({ page }) => {
  const name = "O'Hara's $HOME `fern` \\ \"x\" 🌿 <img src=x>";
  await page.getByLabel("id", { exact: true }).fill("99");
  await page.getByLabel("name", { exact: true }).fill(name);
  await page.getByRole("button", { name: "Copy" }).click();
  await page.getByRole("button", { name: "Copied" }).waitFor();
  const line = await page.evaluate(() => navigator.clipboard.readText());
  const env = { ...process.env, TOKEN: service.token, no_proxy: "127.0.0.1" };
  const { stdout } = await promisify(execFile)("bash", ["-euc", line], { env });
  assert.deepEqual(JSON.parse(stdout), { name, tag: "indoor" });

  // A replay is 200; the name is shown as text, not as HTML.
  await page.getByLabel("Token").fill(service.token);
  const response = await add(page);
  assert.match(await response.innerText(), /200 OK/);
  assert.equal(JSON.parse(await response.locator("pre").innerText()).name, name);
  assert.equal(await page.locator("img").count(), 0);
});

fact("the policy keeps out other hosts and whatever is injected", { timeout: 60_000 }, async () => {
  const reader = await read(browser, service);
  const keptOut = await reader.page.evaluate(async () => {
    const found = [];
    document.addEventListener("securitypolicyviolation", (event) => found.push(event.effectiveDirective));
    await fetch("https://example.com/").catch(() => {});
    const script = document.createElement("script");
    script.textContent = "window.injected = true";
    const style = document.createElement("style");
    style.textContent = "body { display: none }";
    const frame = document.createElement("iframe");
    frame.src = "/docs";
    document.body.append(script, style, frame);
    await new Promise((resolve) => setTimeout(resolve, 0));
    while (found.length < 4) await new Promise((resolve) => requestAnimationFrame(resolve));
    return { found: found.sort(), injected: "injected" in window };
  });
  assert.deepEqual(keptOut, { found: ["connect-src", "frame-src", "script-src-elem", "style-src-elem"], injected: false });
  for (const request of reader.asked) assert.equal(new URL(request.url()).origin, service.origin);
  await reader.close();
});

for (const scheme of ["light", "dark"]) {
  for (const [name, viewport] of Object.entries({ wide: WIDE, narrow: NARROW, tiny: { width: 320, height: 640 } })) {
    test(`${name} and ${scheme}, it fits, has sufficient contrast, and axe finds no problem`, { viewport, colorScheme: scheme }, async ({ page }) => {
      await page.getByLabel("Token").fill(service.token);
      await page.getByLabel("id", { exact: true }).fill("1");
      await screenshot(page, `${name}-${scheme}`);
      await screenshot(page, `${name}-${scheme}-whole`, { fullPage: true });
      assert.equal(await overflow(page), 0);
      assert.deepEqual(await violations(page), []);
      const texts = [".lead", ".meta", ".summary", "nav a", ".hint", ".field label", "#send", "#id", "pre code", ".type", ".required", ".numbers dt", ".numbers .message", ".status .code"];
      for (const text of texts) {
        const found = await contrast(page.locator(text).first());
        assert.ok(found >= CONTRAST_MIN, `${text}: ${found}`);
      }
      await add(page);
      await page.getByLabel("JSON").check();
      assert.deepEqual(await violations(page), []);
      const paper = await page.evaluate(() => getComputedStyle(document.body).backgroundColor);
      const brightness = paper.match(/\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 3;
      assert.ok(scheme === "dark" ? brightness < 60 : brightness > 200, paper);
    });
  }
}

test("the form is next to the operation on wide screens and below it on narrow ones", {}, async ({ page }) => {
  const boxes = async () => [await page.locator("#createPlant").boundingBox(), await page.locator("#try").boundingBox()];
  let [operation, form] = await boxes();
  assert.ok(form.x >= operation.x + operation.width);
  await page.setViewportSize(NARROW);
  [operation, form] = await boxes();
  assert.ok(form.y >= operation.y + operation.height);
});

test("it is readable without JavaScript", { javaScriptEnabled: false }, async ({ page }) => {
  const text = await page.locator("body").innerText();
  for (const part of ["POST", "/plants", "Authentication", "Request body", "Responses", "Errors", "NewPlant", "int64", "40002", "50302", "curl http://", "curl does not"]) {
    assert.ok(text.includes(part), part);
  }
  assert.equal(await page.getByRole("button").count(), 0);
  await screenshot(page, "without-javascript");
});

fact("what it is tested with names no registry", () => {
  const lock = readFileSync(new URL("package-lock.json", import.meta.url), "utf8");
  assert.ok(lock.includes('"integrity"') && !lock.includes("resolved"));
});
