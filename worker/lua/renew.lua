-- Renews the lease of all jobs of a worker under the fence, and writes its heartbeat.
-- KEYS[1]  the queue's prefix; KEYS[2…] the job streams
-- ARGV[1]  worker   ARGV[2] lease in ms   ARGV[3] number of heartbeat fields
-- ARGV[4…] heartbeat fields (name, value); then 4 per row: id, epoch, stream, entry
-- Returns  {now in ms, 1 if the queue's meta is there, {status per row}, {4 per stream, flat}}
--   streams  name, waiting entries, how many of them were never handed out, entry id of the oldest ('' none)
--   OK       renewed          CANCEL  renewed, and the producer wants the job cancelled
--   FENCED   the job is not this worker's any more: drop it silently
--   ERR <text>  the row could not be renewed

local worker, lease, heartbeat = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local now = now_ms()

local function beat()
  local key = base .. 'worker:' .. worker
  own('ZADD', 'workers', now, worker)
  -- The key is nobody's but this worker's: where something else lies there, it makes room.
  if guarded(redis.call, 'HSETNX', key, 'since', now) then redis.call('DEL', key) end
  for i = 4, 2 + 2 * heartbeat, 2 do redis.call('HSET', key, ARGV[i], ARGV[i + 1]) end
  redis.call('HSETNX', key, 'since', now)
  redis.call('HSET', key, 'heartbeat', now, 'lease', lease)
  redis.call('PEXPIRE', key, 10 * lease)
end

-- JUSTID, or each renewal would count as a delivery. A plain XCLAIM without the fence would let a zombie steal the
-- job back from the worker that took it over. FORCE: a pending entry that was lost (acknowledged by hand) comes back.
local function renew(id, epoch, stream, entry)
  if not fence(id, epoch, worker) then return 'FENCED' end
  redis.call('XCLAIM', base .. stream, GROUP, worker, 0, entry, 'FORCE', 'JUSTID')
  redis.call('PEXPIRE', base .. 'job:' .. id, DAY_MS)
  redis.call('PEXPIRE', base .. 'out:' .. id, DAY_MS)
  return redis.call('EXISTS', base .. 'cancel:' .. id) == 1 and 'CANCEL' or 'OK'
end

quiet(now, lease) -- before our own heartbeat makes the newest one look fresh
local known = own('HEXISTS', 'meta', 'version')
beat()
local answers = {}
for i = 4 + 2 * heartbeat, #ARGV, 4 do
  local status
  local problem = guarded(function() status = renew(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]) end)
  answers[#answers + 1] = problem and 'ERR ' .. problem or status
end
local counts = {}
for i = 2, #KEYS do
  local stream = KEYS[i]:sub(#base + 1)
  guarded(function() -- a lost group is the claim's to make again
    local count, new = waiting(stream)
    local oldest = count > 0 and oldest_of(stream, group_of(stream)) or ''
    for _, value in ipairs({stream, count, new, oldest}) do counts[#counts + 1] = value end
  end)
end
return {now, known, answers, counts}
