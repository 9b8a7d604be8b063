-- Ends jobs: terminal event, record, entry and cancel wish, each job in one go.
-- KEYS[1]  the queue's prefix
-- ARGV[1]  worker; then 6 per row: id, epoch, n, stream, entry, event
-- Returns  a line per row: status, n and, after an ERR, its text
--   OK       ended, with exactly one terminal event (also when this row had ended it before)
--   FENCED   the job is not this worker's any more (or had ended otherwise): drop it silently
--   GAP      Redis has n tokens, not the reply's: append from n, then finish again
--   ERR      ended, but its reply could not be written; there is a dead letter

local worker = ARGV[1]

-- Whether this row has ended the job already, and only the answer was lost. It writes nothing.
local function repeated(row)
  local got = redis.call('HMGET', base .. 'job:' .. row.id, 'state', 'epoch', 'worker')
  if got[1] ~= 'ended' or tonumber(got[2]) ~= row.epoch + 1 or got[3] ~= worker then return false end
  local last = redis.call('XRANGE', base .. 'out:' .. row.id, TERMINAL, TERMINAL)[1]
  return last and map_of(last[2]).d == row.event
end

local function finish(row)
  local n, attempts = fence(row.id, row.epoch, worker)
  if not n then
    if repeated(row) then return 'OK', row.n end
    return 'FENCED', 0
  end
  if n ~= row.n then return 'GAP', n end
  local problem = end_job(row.id, row.event, row.stream, row.entry, worker)
  if problem then
    bury({reason = 'unpublishable', error = problem, attempts = attempts, worker = worker, stream = row.stream,
          fields = {id = row.id}})
    return 'ERR', n, problem
  end
  return 'OK', n
end

local answers = {}
for i = 2, #ARGV, 6 do
  local row = {id = ARGV[i], epoch = ARGV[i + 1], n = ARGV[i + 2], stream = ARGV[i + 3], entry = ARGV[i + 4],
               event = ARGV[i + 5]}
  answers[#answers + 1] = answer(finish, row)
end
return table.concat(answers, '\n')
