-- Hands jobs back so that any worker can claim them at once, and rings the bell.
-- KEYS[1]  the queue's prefix
-- ARGV[1]  worker   ARGV[2] lease in ms; then 5 per row: id, epoch, stream, entry, charged ('1' or '0')
-- Returns  status per row:
--   OK       handed back; with `charged` it counts as an attempt and makes the job a suspect
--   FENCED   the job is not this worker's any more
--   GONE     the entry is not in the stream any more, so nobody could take it over: it stays this worker's to end
--   ERR <text>

local worker, lease = ARGV[1], ARGV[2]

local function release(id, epoch, stream, entry, charged)
  if not fence(id, epoch, worker) then return 'FENCED' end
  -- the permanent consumer outlives us; idle = lease lets the claim's scan of expired entries see it, too
  local moved = redis.call('XCLAIM', base .. stream, GROUP, RELEASED, 0, entry, 'IDLE', lease, 'FORCE', 'JUSTID')
  if #moved == 0 then return 'GONE' end
  local job = base .. 'job:' .. id
  redis.call('HINCRBY', job, 'epoch', 1)
  redis.call('HDEL', job, 'state', 'worker')
  if charged == '1' then redis.call('HINCRBY', job, 'attempts', 1) end
  end_trial(worker, id)
  return 'OK'
end

local answers = {}
for i = 3, #ARGV, 5 do
  local status
  local problem = guarded(function()
    status = release(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4])
  end)
  answers[#answers + 1] = problem and 'ERR ' .. problem or status
end
ring()
return answers
