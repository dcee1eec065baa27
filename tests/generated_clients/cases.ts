// Further cases for the example in TypeScript.

import assert from "node:assert/strict";

import { add } from "./add-plant";

for (let round = 0; round < 2; round++) assert.deepEqual(await add({ id: 1, name: "Fern" }), { name: "Fern" });
await assert.rejects(add({ id: 1, name: "Another" }), /^RangeError: 400, error 40009$/);
await assert.rejects(add({ id: 1.5, name: "Fern" }), /^RangeError: 400, error 40002$/);
await assert.rejects(add({ id: 2n ** 63n, name: "Fern" }), /^RangeError: 400, error 40002$/);
assert.deepEqual(await add({ id: 9007199254740993n, name: "exact" }), { name: "exact" });
// Rounded by JavaScript before it is sent, so it is another id.
assert.deepEqual(await add({ id: 9007199254740993, name: "rounded" }), { name: "rounded" });
