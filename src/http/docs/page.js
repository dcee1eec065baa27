// The form: sends the request body as it was typed and shows the response. The service validates it. A number never
// becomes a JavaScript number, which would round it. The token is only in the Authorization header.
"use strict";

const TIMEOUT_MS = 60_000;
const at = (id) => document.getElementById(id);
const url = new URL("plants", document.baseURI).href;
let sending = false;

function bodyOfFields() {
  const members = [];
  // An empty field is no id. Anything else is in the body as it was typed.
  const id = at("id").value.trim();
  if (id !== "") members.push(`"id":${id}`);
  members.push(`"name":${JSON.stringify(at("name").value)}`);
  if (at("has-tag").checked) members.push(`"tag":${JSON.stringify(at("tag").value)}`);
  return `{${members.join(",")}}`;
}

function body() {
  return at("as-json").checked ? at("raw").value : bodyOfFields();
}

function shellQuoted(text) {
  return /^[\w/.:[\]-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

function showCurl() {
  const text = body();
  at("curl").textContent = [
    `curl ${shellQuoted(url)}`,
    `-H "Authorization: Bearer $TOKEN"`,
    `-H 'Content-Type: application/json'`,
    // For `-d`, a value that begins with @ is a file name.
    `${text.startsWith("@") ? "--data-raw" : "-d"} ${shellQuoted(text)}`,
  ].join(" \\\n  ");
}

function element(name, className, ...children) {
  const made = document.createElement(name);
  made.className = className;
  made.append(...children);
  return made;
}

function showResult(className, ...children) {
  at("response").className = `response ${className}`;
  at("response").replaceChildren(...children);
  at("response").hidden = false;
  at("response").scrollIntoView({ block: "nearest" });
}

function showFailure(verdict, sentence) {
  showResult("bad", element("p", "verdict", verdict), element("p", "sentence", sentence));
}

// The members of an Error body, or null.
function errorIn(text) {
  try {
    const { error, message } = JSON.parse(text);
    return Number.isInteger(error) && typeof message === "string" ? { error, message } : null;
  } catch {
    return null;
  }
}

function showResponse(response, text, took) {
  const error = response.ok ? null : errorIn(text);
  const verdict = element("p", "verdict", element("strong", "", `${response.status} ${response.statusText}`));
  const children = [verdict];
  if (error) {
    const number = element("a", "number", `error ${error.error}`);
    number.href = `#error-${error.error}`;
    verdict.append(" ", number);
    children.push(element("p", "sentence", error.message));
  } else {
    children.push(element("pre", "", element("code", "", text)));
  }
  const facts = element("dl", "facts");
  const fact = (name, value) => {
    if (value) facts.append(element("div", "", element("dt", "", name), element("dd", "", value)));
  };
  fact("request id", response.headers.get("x-request-id"));
  fact("retry after", response.headers.get("retry-after") && `${response.headers.get("retry-after")} s`);
  fact("took", `${took < 10 ? took.toFixed(1) : Math.round(took)} ms`);
  showResult(response.ok ? "good" : "bad", ...children, facts);
}

async function send() {
  const headers = new Headers({ "Content-Type": "application/json" });
  const token = at("token").value.trim();
  try {
    if (token !== "") headers.set("Authorization", `Bearer ${token}`);
  } catch {
    showFailure("Not sent", "The token has characters that are not allowed in a header; paste it again.");
    return;
  }
  const start = performance.now();
  try {
    const response = await fetch(url, {
      method: "POST",
      headers,
      body: body(),
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    const text = await response.text();
    showResponse(response, text, performance.now() - start);
  } catch (failure) {
    const why =
      failure.name === "TimeoutError"
        ? `There was no response within ${TIMEOUT_MS / 1000} s.`
        : "The service cannot be reached, or the connection broke.";
    showFailure("No response", `${why} The plant may or may not be stored; adding it again is always safe.`);
  }
}

function showSending(now) {
  sending = now;
  // Not `disabled`, which would remove the keyboard focus.
  at("send").setAttribute("aria-disabled", String(now));
  at("send").textContent = now ? "Adding…" : "Add plant";
  at("response").setAttribute("aria-busy", String(now));
}

at("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (sending) return;
  showSending(true);
  try {
    await send();
  } finally {
    showSending(false);
  }
});

function showForm() {
  const json = at("as-json").checked;
  at("json").hidden = !json;
  at("fields").hidden = json;
  at("tag").disabled = !at("has-tag").checked;
  showCurl();
}

at("form").addEventListener("input", showForm);
at("as-json").addEventListener("change", () => {
  at("raw").value = bodyOfFields();
  showForm();
});

at("reveal").addEventListener("click", () => {
  const reveal = at("token").type === "password";
  at("token").type = reveal ? "text" : "password";
  at("reveal").setAttribute("aria-pressed", String(reveal));
});

at("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(at("curl").textContent);
    at("copy").textContent = "Copied";
  } catch {
    // Without TLS, browsers give a page no access to the clipboard.
    getSelection().selectAllChildren(at("curl"));
    at("copy").textContent = "Selected";
  }
});
at("copy").addEventListener("blur", () => {
  at("copy").textContent = "Copy";
});

at("form").hidden = false;
at("copy").hidden = false;
showForm();
