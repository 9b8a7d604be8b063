-- Gives a dead letter another life: its job, reply and cancel wish go, and it is added to its stream again.
-- KEYS[1]  the queue's prefix
-- ARGV[1]  entry id of the dead letter
-- Returns  the id of the new entry; or an error reply:
--   GONE     there is no such dead letter
--   NOBODY   it cannot be added again: it has no usable id, no stream that is served, or its body was too large to keep
--   LIVE     a job with its id runs or waits again, and must not lose what it has written

local letter = redis.call('XRANGE', base .. 'dead', ARGV[1], ARGV[1])[1]
if not letter then return redis.error_reply('GONE no dead letter ' .. shown(ARGV[1])) end
local fields = map_of(letter[2])
local id, stream, body = fields.id or '', fields.stream or '', fields.body or ''
local shards = tonumber(own('HGET', 'meta', 'shards') or '') or 1
local shard = tonumber(stream:match('^jobs:high:(%d+)$') or stream:match('^jobs:normal:(%d+)$')
  or stream:match('^jobs:low:(%d+)$'))
local served = shard and shard < shards -- else nobody would ever look at it there
if #id > 128 or not id:match('^[%w._:-]+$') or not served or body == '' then
  return redis.error_reply('NOBODY the dead letter ' .. shown(ARGV[1]) .. ' holds no job that could be added again')
end
local live
guarded(function() -- a record of another type is nobody's
  live = redis.call('HLEN', base .. 'job:' .. id) > 0 and redis.call('HGET', base .. 'job:' .. id, 'state') ~= 'ended'
end)
if live then return redis.error_reply('LIVE a job with the id ' .. shown(id) .. ' runs or waits again') end
local args = {'id', id, 'body', body}
for _, name in ipairs({'traceparent', 'tenant', 'affinity'}) do
  if fields[name] then
    args[#args + 1] = name
    args[#args + 1] = fields[name]
  end
end
local entry = redis.call('XADD', base .. stream, '*', unpack(args)) -- first: it may fail
redis.call('DEL', base .. 'job:' .. id, base .. 'out:' .. id, base .. 'cancel:' .. id)
redis.call('XDEL', base .. 'dead', ARGV[1])
ring()
return entry
