-- wrk: one POST a request, ids ascending from where FIRST_ID says, so that rounds do not meet.
local id = tonumber(os.getenv("FIRST_ID") or "0")
wrk.method = "POST"
wrk.headers["Authorization"] = "Bearer " .. os.getenv("TOKEN")
wrk.headers["Content-Type"] = "application/json"

function request()
  id = id + 1
  return wrk.format(nil, "/plants", nil, string.format('{"id":%d,"name":"Monstera deliciosa","tag":"indoor"}', id))
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format("RESULT %.0f %d %.2f %.2f\n", summary.requests / (summary.duration / 1e6),
    errors.status + errors.connect + errors.read + errors.write + errors.timeout,
    latency:percentile(50) / 1000, latency:percentile(99) / 1000))
end
