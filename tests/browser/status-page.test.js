// Tests of the status page in a browser.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { join } from "node:path";
import { after, before, test as fact } from "node:test";

import { contrast, launch, overflow, read, violations } from "./reader.js";
import { startService } from "./service.js";

const CONTRAST_MIN = 4.5;
const WIDE = { width: 1360, height: 1000 };
const NARROW = { width: 360, height: 740 };

let service;
let browser;
let nextId = 1;

before(async () => {
  service = await startService();
  browser = await launch("");
});

after(async () => {
  await browser?.close();
  await service?.stop();
});

// A test with its own page, which must log no errors and request no other host.
function test(name, options, steps) {
  fact(name, { timeout: 60_000 }, async () => {
    const reader = await read(browser, service, { origin: service.opsOrigin, path: "/", ...options });
    try {
      await steps(reader);
      assert.deepEqual(reader.errors, []);
      for (const request of reader.asked) assert.equal(new URL(request.url()).origin, service.opsOrigin);
    } finally {
      await reader.close();
    }
  });
}

const screenshot = (page, name, options) =>
  page.screenshot({ path: join(process.env.SCREENSHOTS, `status-${name}.png`), ...options });

const post = (body) =>
  fetch(`${service.origin}/plants`, {
    method: "POST",
    headers: { authorization: `Bearer ${service.token}`, "content-type": "application/json" },
    body,
  });

async function addPlants(count) {
  for (let added = 0; added < count; added++) assert.equal((await post(`{"id":${nextId++},"name":"Fern"}`)).status, 200);
}

const label = (page, chart) => page.locator(`#chart-${chart} svg`).getAttribute("aria-label");

// Waits until the text of the chart matches, with adds going on.
async function showsUnderLoad(page, chart, pattern) {
  for (let round = 0; round < 30; round++) {
    await addPlants(20);
    await page.waitForTimeout(200);
    if (pattern.test((await label(page, chart)) ?? "")) return;
  }
  assert.match(await label(page, chart), pattern);
}

test("it shows what the node does, live", { viewport: WIDE }, async ({ page }) => {
  await page.waitForFunction(() => document.title === "Ready – Plant Store status");
  assert.equal((await post("{")).status, 400);
  await showsUnderLoad(page, "adds", /^Adds: added [1-9][\d.,]*\/s/);
  await showsUnderLoad(page, "latency", /^Request duration: p50 [\d.]+ (µs|ms|s), p99 [\d.]+ (µs|ms|s), p99\.9 /);
  assert.match(await label(page, "errors"), /^Errors: 40001 /);
  assert.match(await label(page, "memory"), /^Memory: resident [\d.]+ MB$/);
  assert.match(await label(page, "connections"), /^Connections: open \d+/);
  const row = page.getByRole("row", { name: /^Adds, added/ });
  await page.waitForFunction(() => /Adds, added\s[1-9]/.test(document.getElementById("numbers").innerText));
  assert.equal(await row.getByRole("cell").count(), 5);
  await screenshot(page, "wide", { fullPage: true });
});

test("it can be used with the keyboard", {}, async ({ page, asked }) => {
  await addPlants(5);
  const chart = page.locator("#chart-adds svg");
  await chart.waitFor();
  const caption = page.locator("#chart-adds figcaption");
  await page.waitForFunction(() => document.querySelectorAll("#chart-adds path").length > 0);
  await page.waitForTimeout(2500);
  await chart.focus();
  await page.keyboard.press("ArrowLeft");
  assert.match(await caption.innerText(), /\d\d:\d\d:\d\d/);
  assert.equal(await page.locator("#grid .cursor").count() > 5, true);
  await page.keyboard.press("Escape");
  assert.doesNotMatch(await caption.innerText(), /\d\d:\d\d:\d\d/);

  await page.getByLabel("15 minutes").focus();
  await page.keyboard.press("ArrowRight");
  assert.equal(await page.getByLabel("1 hour").isChecked(), true);
  await page.waitForResponse((response) => response.url().includes("interval_s=10"));
  assert.equal(asked.some((request) => request.url().includes("interval_s=10&first=0")), true);
});

for (const [name, options] of Object.entries({
  wide: { viewport: WIDE },
  narrow: { viewport: NARROW },
  dark: { viewport: WIDE, colorScheme: "dark" },
})) {
  test(`it is accessible and fits (${name})`, options, async ({ page }) => {
    await showsUnderLoad(page, "adds", /added [1-9]/);
    assert.deepEqual(await violations(page), []);
    assert.ok((await overflow(page)) <= 0, "it is wider than the window");
    for (const text of ["#state p", "#chart-adds figcaption b", "#numbers td", ".hint"]) {
      assert.ok((await contrast(page.locator(text).first())) >= CONTRAST_MIN, text);
    }
    await screenshot(page, name);
  });
}

test("without JavaScript it is complete as tables", { javaScriptEnabled: false }, async ({ page }) => {
  assert.equal(await page.locator("#charts").isVisible(), false);
  assert.match(await page.locator("#state").innerText(), /^Ready/);
  assert.match(await page.locator("#numbers").innerText(), /Adds, added[\s\S]*Request duration, p99\.9[\s\S]*Memory, resident/);
  assert.match(await page.locator(".settings").innerText(), /max_connections\s+\d+/);
  await screenshot(page, "without-javascript");
});

test("a node that is not ready is shown with the reason", { viewport: WIDE }, async ({ page }) => {
  const locker = spawn("sqlite3", [service.database], { stdio: ["pipe", "ignore", "inherit"] });
  const ended = once(locker, "exit");
  try {
    locker.stdin.write("BEGIN IMMEDIATE;\n");
    await page.getByText("Not ready: the store is busy").waitFor({ timeout: 40_000 });
    assert.match(await page.title(), /^Not ready/);
    await page.locator("#warnings").getByText("the store does not accept writes").first().waitFor();
    assert.deepEqual(await violations(page), []);
    await screenshot(page, "not-ready");
  } finally {
    locker.stdin.end();
    await ended;
  }
  await page.locator("#state .ready").waitFor({ timeout: 40_000 });
});

fact("a node that does not respond is shown", { timeout: 60_000 }, async () => {
  const reader = await read(browser, service, { origin: service.opsOrigin, path: "/" });
  try {
    await reader.page.locator("#chart-adds svg").waitFor();
    service.signal("SIGSTOP");
    await reader.page.getByText("No response from the private listener").waitFor();
    service.signal("SIGCONT");
    await reader.page.locator("#state .ready").waitFor();
  } finally {
    service.signal("SIGCONT");
    await reader.close();
  }
});
