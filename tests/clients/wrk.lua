-- Adds a plant with every request: wrk ... -- TOKEN BODY EXPECTED. Prints how many responses there were, and how many differ.

local threads = {}

function setup(thread)
  table.insert(threads, thread)
end

function init(arguments)
  wrk.method = "POST"
  wrk.headers["Authorization"] = "Bearer " .. arguments[1]
  wrk.headers["Content-Type"] = "application/json"
  wrk.body = arguments[2]
  expected = arguments[3]
  responses, different = 0, 0
end

function response(status, _, body)
  responses = responses + 1
  if status ~= 200 or body ~= expected then
    different = different + 1
  end
end

function done(summary)
  local responses, different = 0, 0
  for _, thread in ipairs(threads) do
    responses = responses + thread:get("responses")
    different = different + thread:get("different")
  end
  local errors = summary.errors
  local failed = errors.connect + errors.read + errors.write + errors.timeout
  io.write(string.format("responses=%d different=%d failed=%d\n", responses, different, failed))
end
