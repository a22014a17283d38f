-- Decides requests of tenants over all router processes. One key per tenant, a hash of
--   r, t        times at which the buckets of requests and tokens will be full
--   br, bt      the part of r and t that processes knew when they called first
--   c:PROCESS   requests in flight in a process, with those charged ahead, and when that expires
--   b:PROCESS   number of its last call, what this call granted (requests, tokens), and when that
--               is of no use any more
--   n           time of the last call, so that times follow a clock that is set back
-- ARGV: process, lease, then for each key
--   number of the call, requests in flight, with those charged ahead, charges (requests, tokens),
--   1 if the call is made again because its reply was lost; it then has no new requests,
--   seconds to full as last known (requests, tokens),
--   limits (requests and tokens per minute, concurrency; -1: none),
--   what is charged ahead and not used yet (requests, tokens), what to add to that,
--   number of new requests, and the tokens of each.
-- Returns for each key: microseconds to full (requests, tokens), requests in flight elsewhere, what
-- is charged ahead (requests, tokens), and for each new request the exceeded limit (0: none,
-- 1: requests, 2: tokens, 3: concurrency) and the microseconds to wait.
local MINUTE, ROUNDING, KEEP, KEEP_CALL = 60, 1e-6, 3600, 300
local SHARE = 64 -- a process may have one part of so many of what is left
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local process, lease = ARGV[1], tonumber(ARGV[2])
local at = 2
local function take()
  at = at + 1
  return tonumber(ARGV[at])
end

local function charge(full, amount, limit)
  if limit <= 0 then return full end
  return math.max(full, now) + amount * MINUTE / limit
end

-- Adds what a process knew of the time before the server had data, unless another one knew it too.
local function restore(full, base, left)
  local before = math.max(base, now)
  local after = math.max(before, now + left)
  if after == before then return full, base end
  return math.max(full, now) + after - before, after
end

local function wait(full, amount, limit)
  if limit <= 0 then return 0 end
  local seconds = math.max(full - now, 0) + math.min(amount * MINUTE / limit, MINUTE) - MINUTE
  return seconds > ROUNDING and seconds or 0
end

local function share(full, limit)
  if limit <= 0 then return math.huge end
  return math.floor((MINUTE - math.max(full - now, 0)) * limit / MINUTE / SHARE)
end

local function micros(seconds)
  return math.floor(math.max(seconds, 0) * 1e6)
end

local found = {}
for _, key in ipairs(KEYS) do
  local call, running, requests, tokens, again = take(), take(), take(), take(), take()
  local left_requests, left_tokens = take(), take()
  local per_minute, tokens_per_minute, concurrency = take(), take(), take()
  local held_requests, held_tokens = take(), take()
  local ahead_requests, ahead_tokens, count = take(), take(), take()

  local known, fields = {}, redis.call('HGETALL', key)
  for i = 1, #fields, 2 do known[fields[i]] = fields[i + 1] end
  local back = math.max(tonumber(known.n or 0) - now, 0)
  local full_r, full_t = tonumber(known.r or 0) - back, tonumber(known.t or 0) - back
  local base_r, base_t = tonumber(known.br or 0) - back, tonumber(known.bt or 0) - back
  if not known['b:' .. process] then -- the server has lost its data, or the process is new
    full_r, base_r = restore(full_r, base_r, left_requests)
    full_t, base_t = restore(full_t, base_t, left_tokens)
  end
  local elsewhere = 0
  for field, value in pairs(known) do
    if field:sub(1, 2) == 'b:' and field ~= 'b:' .. process then
      if tonumber(value:match('(%S+)$')) < now then redis.call('HDEL', key, field) end
    elseif field:sub(1, 2) == 'c:' and field ~= 'c:' .. process then
      local number, expires = value:match('(%d+) (.+)')
      if tonumber(expires) > now then
        elsewhere = elsewhere + tonumber(number)
      else
        redis.call('HDEL', key, field)
      end
    end
  end

  if again > 0 then
    local done, granted_r, granted_t = (known['b:' .. process] or '0 0 0'):match('(%d+) (%S+) (%S+)')
    if tonumber(done) == call then -- the process has decided its requests itself in the meantime
      requests, tokens = -tonumber(granted_r), -tonumber(granted_t)
    end
  end
  full_r = charge(full_r, requests, per_minute)
  full_t = charge(full_t, tokens, tokens_per_minute)

  local answer, granted_r, granted_t = {}, 0, 0
  for _ = 1, count do
    local amount = take()
    local limit, seconds = 0, 0
    if concurrency >= 0 and running + elsewhere >= concurrency then
      limit = 3
    else
      seconds = wait(full_r, 1, per_minute)
      if seconds > 0 then
        limit = 1
      else
        seconds = wait(full_t, amount, tokens_per_minute)
        if seconds > 0 then limit = 2 end
      end
    end
    if limit == 0 then
      full_r = charge(full_r, 1, per_minute)
      full_t = charge(full_t, amount, tokens_per_minute)
      granted_r, granted_t, running = granted_r + 1, granted_t + amount, running + 1
    end
    answer[#answer + 1] = limit
    answer[#answer + 1] = micros(seconds)
  end

  local most_requests, most_tokens = share(full_r, per_minute), share(full_t, tokens_per_minute)
  if concurrency >= 0 then
    most_requests = math.min(most_requests, math.floor((concurrency - running - elsewhere) / SHARE))
  end
  if most_requests < 1 or most_tokens < 1 then most_requests, most_tokens = 0, 0 end
  ahead_requests = math.max(math.min(ahead_requests, most_requests - held_requests), 0)
  ahead_tokens = math.max(math.min(ahead_tokens, most_tokens - held_tokens), 0)
  full_r = charge(full_r, ahead_requests, per_minute)
  full_t = charge(full_t, ahead_tokens, tokens_per_minute)
  granted_r, granted_t = granted_r + ahead_requests, granted_t + ahead_tokens
  running = running + ahead_requests

  redis.call('HSET', key, 'r', string.format('%.6f', full_r), 't', string.format('%.6f', full_t),
    'br', string.format('%.6f', base_r), 'bt', string.format('%.6f', base_t),
    'n', string.format('%.6f', now),
    'b:' .. process, string.format('%d %d %d %d', call, granted_r, granted_t,
      math.max(now, full_r, full_t) + KEEP_CALL))
  if running > 0 then
    redis.call('HSET', key, 'c:' .. process, string.format('%d %.6f', running, now + lease))
  else
    redis.call('HDEL', key, 'c:' .. process)
  end
  redis.call('EXPIRE', key, KEEP)
  found[#found + 1] = {
    micros(full_r - now), micros(full_t - now), elsewhere, ahead_requests, ahead_tokens,
    unpack(answer)}
end
return found
