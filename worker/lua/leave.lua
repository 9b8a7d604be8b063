-- A worker's goodbye. Its consumers go only where nothing is pending: XGROUP DELCONSUMER drops pending entries.
-- KEYS[1]  the queue's prefix
-- ARGV[1]  worker; ARGV[2…] the job streams
-- Returns  the number of streams in which something was still pending

local worker, kept = ARGV[1], 0
for i = 2, #ARGV do
  guarded(function()
    local stream = base .. ARGV[i]
    if #redis.call('XPENDING', stream, GROUP, '-', '+', 1, worker) > 0 then kept = kept + 1
    else redis.call('XGROUP', 'DELCONSUMER', stream, GROUP, worker) end
  end)
end
redis.call('ZREM', base .. 'workers', worker)
redis.call('DEL', base .. 'worker:' .. worker)
return kept
