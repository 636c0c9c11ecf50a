-- wrk -s search.lua URL -- PATH FILE: sends the lines of FILE as POST requests to PATH, in turn.

local requests, position = {}, 0

wrk.headers["Content-Type"] = "application/json"

function init(arguments)
  for body in io.lines(arguments[2]) do
    requests[#requests + 1] = wrk.format("POST", arguments[1], nil, body)
  end
end

function request()
  position = position % #requests + 1
  return requests[position]
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    '\n{"seconds": %.6f, "requests": %d, "p50_ms": %.3f, "p90_ms": %.3f, "p99_ms": %.3f, '
      .. '"max_ms": %.3f, "errors": {"status": %d, "connect": %d, "read": %d, "write": %d, '
      .. '"timeout": %d}}\n',
    summary.duration / 1e6, summary.requests,
    latency:percentile(50) / 1e3, latency:percentile(90) / 1e3, latency:percentile(99) / 1e3,
    latency.max / 1e3,
    errors.status, errors.connect, errors.read, errors.write, errors.timeout
  ))
end
