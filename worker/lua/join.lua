-- Writes a queue's meta where it is new, and makes the groups, at id 0 so that what was submitted before is served.
-- KEYS[1]  the queue's prefix
-- ARGV[1]  protocol version   ARGV[2] shard count of a new (or flushed) queue   ARGV[3] digest of model and tokenizer
-- Returns  {version, shards, digest, number of groups made}; the groups are only made when version and digest are ours and
--          shards is a count (1 to 256); a job stream of another type is left to the claim, which serves the others

local MAX_SHARDS = 256 -- each claim looks at all of them

own('HSETNX', 'meta', 'version', ARGV[1])
own('HSETNX', 'meta', 'shards', ARGV[2])
own('HSETNX', 'meta', 'model', ARGV[3])
local got = own('HMGET', 'meta', 'version', 'shards', 'model')
local shards, made = got[2]:match('^%d+$') and tonumber(got[2]) or 0, 0
if got[1] == ARGV[1] and got[3] == ARGV[3] and shards <= MAX_SHARDS then
  for _, priority in ipairs({'high', 'normal', 'low'}) do
    for shard = 0, shards - 1 do
      local stream = base .. 'jobs:' .. priority .. ':' .. shard
      local problem = guarded(function() redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM') end)
      if not problem then made = made + 1
      elseif not problem:find('BUSYGROUP', 1, true) and not problem:find('WRONGTYPE', 1, true) then
        error({err = problem}, 0)
      end
    end
  end
end
return {got[1], got[2], got[3], made}
