-- Deletes what killed workers left behind, once nothing is pending for them: consumers and heartbeats.
-- KEYS[1]  the queue's prefix
-- ARGV[1]  lease in ms; ARGV[2…] the job streams
-- Returns  the number of consumers deleted

local oldest = now_ms() - 10 * tonumber(ARGV[1])
local reaped = 0

local function reap(stream)
  for _, flat in ipairs(redis.call('XINFO', 'CONSUMERS', stream, GROUP)) do
    local consumer = map_of(flat)
    local seen = tonumber(redis.call('ZSCORE', base .. 'workers', consumer.name) or '0')
    local silent = seen < oldest and tonumber(consumer.idle) > 10 * tonumber(ARGV[1])
    if consumer.name ~= RELEASED and silent and tonumber(consumer.pending) == 0 then
      redis.call('XGROUP', 'DELCONSUMER', stream, GROUP, consumer.name)
      reaped = reaped + 1
    end
  end
end

for i = 2, #ARGV do guarded(reap, base .. ARGV[i]) end
redis.call('ZREMRANGEBYSCORE', base .. 'workers', '-inf', oldest)
return reaped
