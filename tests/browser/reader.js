// Opens pages in Debian's Chromium and records their errors.

import { createRequire } from "node:module";

import { chromium } from "playwright-core";

const axe = createRequire(import.meta.url).resolve("axe-core/axe.min.js");

// Accepts certificates with a public key of this hash.
export function launch(keyHash) {
  return chromium.launch({
    executablePath: process.env.CHROMIUM,
    // The sandbox does not work as root. No other host name is resolved.
    args: ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", `--ignore-certificate-errors-spki-list=${keyHash}`],
    chromiumSandbox: process.getuid() !== 0,
  });
}

// A page at `path`, with its requests and errors.
export async function read(browser, service, { origin = service.origin, path = "/docs", ...options } = {}) {
  const context = await browser.newContext({ viewport: { width: 1360, height: 900 }, ...options });
  const page = await context.newPage();
  const asked = [];
  const errors = [];
  page.on("request", (request) => asked.push(request));
  page.on("pageerror", (error) => errors.push(String(error)));
  page.on("console", (message) => {
    // A 400 response is not an error of the page.
    if (!message.text().startsWith("Failed to load resource: the server responded")) {
      errors.push(`${message.type()}: ${message.text()}`);
    }
  });
  if (options.javaScriptEnabled !== false) await page.addInitScript({ path: axe });
  await page.goto(origin + path);
  return { page, asked, errors, close: () => context.close() };
}

export const posts = (asked) => asked.filter((request) => request.method() === "POST");

// Submits the form, and waits for the result.
export async function add(page) {
  await page.getByRole("button", { name: "Add plant" }).click();
  const response = page.getByRole("status");
  await response.waitFor();
  await page.waitForSelector("#response[aria-busy=false]");
  return response;
}

// The contrast ratio of an element's text and background by WCAG 2. A page that replaces its elements may have removed the one that was
// found; then it is looked up again.
export async function contrast(locator) {
  for (let attempt = 0; attempt < 10; attempt++) {
    const ratio = await contrastOf(locator);
    if (ratio !== null) return ratio;
  }
  throw new Error(`${locator} is replaced all the time`);
}

function contrastOf(locator) {
  return locator.evaluate((element) => {
    if (!element.isConnected) return null;
    const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const pixel = (colours) => {
      for (const colour of colours) {
        context.fillStyle = colour;
        context.fillRect(0, 0, 1, 1);
      }
      return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const luminance = (rgb) => {
      const [r, g, b] = rgb.map((value) => value / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = [];
    for (let at = element; at; at = at.parentElement) behind.unshift(getComputedStyle(at).backgroundColor);
    const paper = luminance(pixel(behind));
    const ink = luminance(pixel([...behind, getComputedStyle(element).color]));
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  });
}

export const overflow = (page) =>
  page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);

// The problems that axe finds on the page.
export async function violations(page) {
  const found = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  return found.violations.map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.html).join(" | ")}`);
}
